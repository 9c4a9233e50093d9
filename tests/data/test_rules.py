"Rules and repairs on hostile and on real text: fuzz, planted lists, real pages (needs the extra `data`)"
import pickle, random, re, string
from collections import Counter
from functools import partial

import numpy as np
import pytest

from bmlab.data.samples import sample_texts
from bmlab.data.rules import (
    HAN,
    CharModel,
    ChineseQuality,
    LanguageRule,
    PerplexityRule,
    chinese_figures,
    chinese_lines,
    extract,
    find_pii,
    language,
    mask_pii,
    ngram_hashes,
    perplexity,
    pii_examples,
    repair,
    repeated_share,
    valid_card,
    valid_identity,
)


def texts(name):
    try: return sample_texts(name).text.tolist()
    except RuntimeError as e: pytest.skip(f"needs the sample texts {name}: {e}".splitlines()[0])


def strings(count, seed=0, longest=80):
    "Strings of letters, Chinese, controls, marks, emoji, lone surrogates, markup"
    rng = random.Random(seed)
    kinds = [
        string.printable,
        "的了是在和有不人我这们這們國国，。！？…“”",
        "\x00\x01\x1b\x7f\x85\xa0\u200b\u200d\u2028\ufeff\ufffd\ue000\U0001f600\u0301\u3000",
        "ÃÂâ€œ\x9d©ã\x81",
        "<>&;:/@.?=#[](){}|%+-0123456789",
    ]
    return ["".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randrange(longest))) for _ in range(count)]


def test_repair_of_anything_is_text_and_final():
    for t in strings(1500):
        once = repair(t)
        assert (
            isinstance(once, str)
            and "\r" not in once
            and "\x1b" not in once
            and "\x00" not in once
            and "\n\n\n" not in once
        )
        assert repair(repair(once)) == repair(once)
    assert repair("") == "" and repair("\ud800x") == "\ufffdx"


def test_repair_leaves_good_text_alone():
    good = texts("news-199801")[::40] + texts("movies")[::40]
    assert sum(repair(t, width=False) != t.rstrip() for t in good) <= 0.02 * len(good)


def test_chinese_decoded_wrongly_is_turned_back():
    good = [t for t in texts("reviews")[::11] + texts("news-199801")[::31] if len(HAN.findall(t)) >= 4]
    as_latin = [
        (t, t.encode("gb2312").decode("latin-1")) for t in good if t.encode("gb2312", "ignore").decode("gb2312") == t
    ]
    as_gbk = [
        (t, raw.decode("gb18030"))
        for t in good
        if (raw := t.encode()).decode("gb18030", "ignore").encode("gb18030") == raw
    ]
    for pairs in (as_latin, as_gbk):
        assert len(pairs) > 60 and np.mean([repair(wrong) == repair(t) for t, wrong in pairs]) > 0.85
    european = [
        "naïve café — ÅÄÖ",
        "ÀÉÈÙ",
        "Ñandú ÁÉÍÓÚ",
        "ÜÖÄßÜÖÄß",
        "GarcÃ\xada and TalancÃ³n",
        "HÃ©lÃ¨ne",
        "联通",
        "Ünïcödé Çà et là",
    ]
    assert [repair(t) for t in european] == [
        "naïve café — ÅÄÖ",
        "ÀÉÈÙ",
        "Ñandú ÁÉÍÓÚ",
        "ÜÖÄßÜÖÄß",
        "García and Talancón",
        "Hélène",
        "联通",
        "Ünïcödé Çà et là",
    ]
    assert not [t for t in texts("movies")[::3] if HAN.search(repair(t))]


def test_joiners_of_emoji_and_leading_spaces_stay():
    family = "\U0001F468\u200d\U0001F469\u200d\U0001F467"
    assert repair(f"  def f():\n\treturn '{family}'") == f"  def f():\n\treturn '{family}'"


def test_every_rule_takes_anything():
    rules = [
        LanguageRule(),
        ChineseQuality(),
        ChineseQuality(sensitive=("词",)),
        PerplexityRule(score=CharModel.fit(["天下大势"]).perplexity, high=1e9),
    ]
    for t in strings(400, seed=1) + ["", "\n", " ", "a", "的"]:
        assert all(r(t) is None or isinstance(r(t), str) for r in rules)
        assert (
            isinstance(chinese_lines(t), str)
            and isinstance(mask_pii(t), str)
            and np.isfinite(list(chinese_figures(t).values())).all()
        )


@pytest.mark.parametrize("text", [
    "1" * 50_000, "1 " * 25_000, "a@" * 25_000, "a@a" + "-a" * 25_000, "a@" + "a." * 25_000, "a|" * 25_000,
    "://a:" * 10_000, "://" + "a:" * 25_000, "?token=" * 7_000, "1." * 25_000, "\x1b]" * 25_000,
    "\x1b[" + "0" * 50_000, "首页 " * 20_000, " " * 50_000 + "x", "\n" * 50_000, "身份证" * 20_000, "0123-" * 10_000,
    "&amp;" * 10_000, "+" * 50_000,
], ids=lambda t: t[:6].encode("unicode_escape").decode())
def test_no_text_makes_a_pattern_explode(text):
    # (a pattern that backtracks would not come back)
    repair(text), language(text), ChineseQuality()(text), chinese_lines(text), find_pii(text)


def test_languages():
    zh, en = [t for t in texts("reviews")[::3] if len(t) >= 10 and HAN.search(t)], texts("movies")[::2]
    assert (
        np.mean([language(t).code == "zh" for t in zh]) >= 0.99
        and np.mean([language(t).code == "en" for t in en]) >= 0.99
    )
    assert all(language(t).code == "zh" for t in (
        "書的質量很差，味道也很大", "订单都7天了，怎么还没送到？~！！！", "硬着头皮看了几页,仍不觉昏昏欲睡,上当.",
    ))
    assert [
        language(t).code
        for t in (
            "これは日本語の文章です。",
            "이것은 한국어 문장입니다.",
            "東京都知事は昨日、新しい計画を発表しました。",
            "Это русское предложение.",
        )
    ] == ["ja", "ko", "ja", "ru"]
    assert [
        language(t).code
        for t in (
            "今天天气很好，我们去公园玩。请联系abc@example.com，谢谢大家的支持与帮助。",
            "转发微博@张三：今天天气很好，我们一起去公园玩。",
            "https://example.com/，今天天气很好。",
        )
    ] == ["zh"] * 3
    assert (
        language("https://example.com/a/b?c=d").code == ""
        and language("HELLO THIS IS ALL CAPITAL LETTERS").code == "en"
    )


def test_repeated_share_is_what_it_says():
    rng = random.Random(0)
    for _ in range(200):
        t, n = "".join(rng.choices("ab", k=rng.randrange(0, 60))), rng.randrange(1, 8)
        seen, covered = set(), set()
        for i in range(len(t) - n + 1):
            if t[i:i + n] in seen: covered |= set(range(i, i + n))
            seen.add(t[i:i + n])
        assert repeated_share(t, n) == (len(covered) / len(t) if len(t) >= n else 0.0)
        assert len(set(ngram_hashes(t, n).tolist())) == len({t[i:i + n] for i in range(len(t) - n + 1)})


def test_real_chinese_passes_and_scripts_are_told_apart():
    good = ChineseQuality()
    for name in ("news-199801", "poems"):
        long = [t for t in texts(name)[::24 if name == "news-199801" else 4] if len(t) >= 30]
        assert np.mean([good(t) is None for t in long]) > 0.95
    mixed = ChineseQuality(
        min_han=None, min_ended=None, max_repeated=None, max_symbols=None, max_top_4gram=None, max_navigation=None
    )
    pages = texts("manpages-zh")[::60]
    assert np.mean([mixed(t) == "scripts mixed" for t in pages]) < 0.1
    simplified, traditional = (
        next(
            t
            for t in pages
            if chinese_figures(t)["telling"] > 100
            and ("们" in t or "这" in t) is s
            and ("們" in t or "這" in t) is not s
        )
        for s in (True, False)
    )
    assert (
        mixed(simplified[:800]) is None
        and mixed(traditional[:800]) is None
        and mixed(simplified[:800] + traditional[:800]) == "scripts mixed"
    )


def test_planted_personal_data_is_found_and_clean_text_unchanged():
    planted = pii_examples(400, seed=7)
    assert [(k, d) for k, d, s in planted if mask_pii(s) != s.replace(d, f"[{k.upper()}]")] == []
    real = texts("news-199801")[::4] + texts("movies")[::3] + texts("reviews")[::3]
    assert len(real) > 5000
    # what was found is an address, or a number that says telephone, or has a mobile's or an area's form
    for t in (t for t in real if mask_pii(t) != t):
        assert all(
            re.search(r"@|1[3-9]\d{9}|0\d{2,3}-?\d{7,8}|[48]00-\d{3}-\d{4}", f.text) or f.kind == "account"
            for f in find_pii(t)
        ), [f.text for f in find_pii(t)]
    assert sum(mask_pii(t) != t for t in real) < 20


def test_accounts_and_old_identity_numbers():
    assert (
        mask_pii("QQ：710959285，QQ群 12345，微信号: zhang_san01，身份证号码：110105491231002。")
        == "QQ：[ACCOUNT]，QQ群 [ACCOUNT]，微信号: [ACCOUNT]，身份证号码：[ID]。"
    )
    no_number = "QQ很好用，微信也好用：都行，用了110105491231002次"
    assert mask_pii(no_number) == no_number


def test_numbers_that_are_not_personal_stay():
    cases = (
        "订单号1411592970", "ISBN 978-7-02-000220-7", "2008-06-04 9:30", "1998年1月1日", "价格12345678.90元",
        "0.13812345678", "version 10.0.0.1", "192.168.0.1 和 127.0.0.1", "99999999999999999X",
        "4111111111111112", "sha 13812345678abcdef", "12:30:45", "::1", "std::vector<int>", "a:b:c",
        "3.14159265358979", "1234-5678", "@用户 你好", "π=3.1415926535", "C:/a:b@c",
    )
    for t in cases:
        assert mask_pii(t) == t, (t, find_pii(t))


def test_offsets_and_full_width():
    t = "电话１３８１２３４５６７８，邮箱ｚｈａｎｇ＠example．com。"
    found = find_pii(t)
    assert [(f.kind, t[f.start:f.end] == f.text) for f in found] == [("phone", True), ("email", True)]
    assert mask_pii(t) == "电话[PHONE]，邮箱[EMAIL]。" and mask_pii(mask_pii(t)) == mask_pii(t)


def test_checksums_catch_every_single_wrong_digit():
    for kind, datum, _ in pii_examples(60, seed=3):
        digits = datum.replace(" ", "")
        check = valid_identity if kind == "id" and len(digits) == 18 else valid_card if kind == "card" else None
        if check is None: continue
        assert check(digits)
        assert not any(
            check(digits[:i] + c + digits[i + 1 :]) for i in range(len(digits)) for c in string.digits if c != digits[i]
        )


@pytest.mark.parametrize("name", ["help-zh", "help-en"])
def test_no_navigation_survives_on_real_pages(name):
    sources = texts(name)[5::40]
    pages = [extract(s) for s in sources]
    everywhere = {
        t for t, n in Counter(t for p in pages for t in {b[0] for b in p.blocks}).items() if n > len(pages) / 2
    }
    assert len(everywhere) >= 4 and all(
        sum(t in p.text.splitlines() for p in pages) <= 0.01 * len(pages) for t in everywhere
    )
    assert sum(not p.text for p in pages) <= 0.02 * len(pages)
    body = [
        (len(t), kept)
        for p in pages
        for t, place, kept in p.blocks
        if place not in ("header", "footer", "nav", "aside", "label", "button", "form", "hidden", "p.related")
    ]
    assert sum(n for n, kept in body if kept) > 0.93 * sum(n for n, _ in body)
    # and it is the page's text
    assert min(sum(len(t) for t, _, kept in p.blocks if kept) / len(p.text) for p in pages if len(p.text) > 200) > 0.5
    assert np.mean([language(p.text).code in ("zh", "en") for p in pages]) > 0.95


@pytest.mark.parametrize("source", [
    "<div>" * 3000 + "x", "<p><b>" * 2000 + "x", "<a href='" * 2000, "<p>a\0b</p>", "<table>" * 1000 + "x",
    "<" * 20_000, "<p " + "a=1 " * 20_000 + ">x</p>", "<p>\ud800x</p>", "no markup at all", "<!-- -->",
    "<?xml version='1.0' encoding='utf-8'?><html xmlns='http://www.w3.org/1999/xhtml'><body><p>一句话。</p></body></html>",
    b"\xff\xfe<", b"", b"<meta charset=nonsense><p>text</p>", b"<meta charset=utf-8><p>\xff\xfe</p>",
], ids=range(15))
def test_a_page_of_anything_is_a_page(source):
    page = extract(source)
    assert (
        isinstance(page.text, str)
        and isinstance(page._repr_html_(), str)
        and all(isinstance(t, str) for t, _ in page.removed)
    )


def test_the_picture_of_a_page_is_escaped():
    page = extract(
        "<html><head><title>&lt;script&gt;alert(1)&lt;/script&gt;</title></head><body><nav>&lt;img src=x "
        "onerror=alert(2)&gt;</nav><p>The first sentence of a page that is long enough. &lt;b&gt;</p></body></html>"
    )
    assert (
        "<script" not in page._repr_html_()
        and "<img" not in page._repr_html_()
        and page.title == "<script>alert(1)</script>"
    )


def test_char_model_tells_text_from_noise_and_survives_a_file(tmp_path):
    reviews = [t for t in texts("reviews") if len(t) >= 20][:4000]
    rng = random.Random(0)
    model = CharModel.fit(reviews[:3600])
    held = reviews[3600:]
    plain, noise = model.perplexity(held), model.perplexity(["".join(rng.sample(t, len(t))) for t in held])
    assert np.mean(np.array(plain) < np.array(noise)) > 0.98
    model.save(tmp_path / "m.npz")
    again = CharModel.load(tmp_path / "m.npz")
    assert again.perplexity(held[:20]) == model.perplexity(held[:20]) and pickle.loads(pickle.dumps(model)).perplexity(
        held[:2]
    ) == model.perplexity(held[:2])
    model.save(tmp_path / "m")                                              # .npz is added
    assert (tmp_path / "m.npz").is_file() and not (tmp_path / "m").exists()
    np.savez(tmp_path / "bad.npz", alpha=np.array([{"x": 1}], dtype=object), keys0=np.zeros(1))
    with pytest.raises(ValueError, match="allow_pickle"): CharModel.load(tmp_path / "bad.npz")


def test_model_perplexity_is_that_of_the_text_alone():
    import torch, transformers as tf
    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64)).eval()
    tok = lambda rows, add_special_tokens: {"input_ids": [[ord(c) % 50 for c in r] for r in rows]}
    rows = ["hello there", "x", "", "a much longer line of text than the others", "ab"]
    got = perplexity(rows, model, tok, batch=2)
    for r, g in zip(rows, got):
        if len(r) < 2:
            assert np.isnan(g)
            continue
        ids = torch.tensor([[ord(c) % 50 for c in r]])
        assert abs(np.log(g) - model(input_ids=ids, labels=ids).loss.item()) < 1e-5
    assert perplexity(rows, model, tok, max_tokens=5)[3] != got[3] and perplexity([], model, tok) == []
    rule = PerplexityRule(score=partial(perplexity, model=model, tok=tok), high=1.0)
    assert rule("hello") == "unlikely text" and rule("x") == "too short to score"

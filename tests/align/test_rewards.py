"Rewards that raise, hang, lie or leave something running"
import json, os, signal, subprocess, sys, threading, time

import pytest
import torch
from conftest import gone, until

from bmlab.align.rewards import RewardError, UnitTest, exact, follows_schema, score

PASSES = "def add(a, b): return a + b"
TEST = "assert add(2, 3) == 5"


def stuck(prompt, text):
    while True:
        try: time.sleep(1)
        except Exception: pass


def test_error_names_prompt_and_text_in_one_line():
    def odd(prompt, text): return 1 / (len(text) - 3)

    with pytest.raises(RewardError, match="reward 'odd' raised ZeroDivisionError.*prompt 'why' and text 'abc'") as e:
        score(odd, ["so", "why"], ["ab", "abc"])
    assert (e.value.prompt, e.value.text, "\n" in str(e.value)) == ("why", "abc", False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", torch.tensor([1.0, 2.0])])
def test_what_is_no_number_is_an_error_or_zero(value):
    with pytest.raises(RewardError, match="returned"): score(lambda p, t: value, [""], ["x"])
    table = score({"a": lambda p, t: value, "b": lambda p, t: 2}, [""], ["x"], bad="zero")
    assert table.reward.tolist() == [2.0] and table.error[0].startswith("a returned")


def test_a_hanging_reward_ends_in_any_thread():
    before = signal.getsignal(signal.SIGALRM)
    assert score(stuck, ["?"], ["x"], time_limit=0.05, bad="zero").error[0] == "stuck took longer than 0.05 s"
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(score(stuck, ["?"], ["x"], 0.05, "zero")), daemon=True)
    thread.start()
    thread.join(20)
    assert seen[0].error[0] == "stuck took longer than 0.05 s"


def test_a_failing_batch_is_asked_one_by_one_and_names_the_text():
    class Judge:
        def many(self, prompts, texts): return [self(p, t) for p, t in zip(prompts, texts)]
        def __call__(self, prompt, text): return {"good": 1.0}[text]

    with pytest.raises(RewardError, match="Judge.*KeyError.*text 'bad'"): score(Judge(), ["", ""], ["good", "bad"])
    assert score(Judge(), ["", ""], ["good", "bad"], bad="zero").reward.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("text, why", [
    (PASSES, None),
    (f"Well.\n```python\n{PASSES}\n```\nDone", None),
    ("def add(a, b): return 5 if b == 3 else 0\nimport sys; sys.exit(0)", "SystemExit: 0"),
    ("import os; os._exit(0)", "ended itself"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended itself"),
    ("while True: pass", "took longer than 1 s"),
    ("x = bytearray(10**9)", "MemoryError"),
    ("open('big', 'wb').write(bytes(1 << 25))", "OSError: [Errno 27] File too large"),
    ("import os\nassert 'SECRET' not in os.environ and not os.listdir('.')\n" + PASSES, None),
    ("print('x' * 10**6)\n" + PASSES, None),
])  # fmt: skip
def test_unit_test_says_what_went_wrong(text, why, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert UnitTest(TEST, seconds=1).run("", text) == why


FORKS = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open({path!r} + "~", "w") as f: f.write(str(os.getpid()))
        os.rename({path!r} + "~", {path!r})
        time.sleep(600)
    os._exit(0)
while not os.path.exists({path!r}): time.sleep(0.001)
"""


@pytest.mark.parametrize("then", [PASSES, "while True: pass"])
def test_unit_test_leaves_no_orphan(then, tmp_path):
    path = str(tmp_path / "pid")
    test = UnitTest(TEST, seconds=60 if then == PASSES else 5)     # (on a busy core a fork takes a second)
    assert (test.run("", FORKS.format(path=path) + then) is None) == (then == PASSES)
    assert gone(int(open(path).read()))


TRAINER = """
import json, subprocess, sys, time
command, code = json.load(sys.stdin)
p = subprocess.Popen([sys.executable, "-I", "-S", "-c", command], stdin=subprocess.PIPE, start_new_session=True)
p.stdin.write((json.dumps(dict(code=code, tests="", word="yes")) + "\\n").encode())
p.stdin.flush()
time.sleep(600)
"""


def test_unit_test_leaves_no_orphan_when_the_trainer_is_killed(tmp_path):
    path = str(tmp_path / "pid")
    code = FORKS.format(path=path) + "time.sleep(600)"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdin=subprocess.PIPE)
    trainer.stdin.write(json.dumps([UnitTest("", seconds=600).command, code]).encode())
    trainer.stdin.close()
    until(lambda: os.path.exists(path) and open(path).read())
    trainer.kill()
    trainer.wait()
    until(lambda: gone(int(open(path).read())))


def test_an_alarm_ends_a_unit_test_too(tmp_path):
    path = str(tmp_path / "pid")
    slow = UnitTest("", seconds=600)
    text = FORKS.format(path=path) + "time.sleep(600)"
    table = score(lambda p, t: slow(p, t), [""], [text], time_limit=5, bad="zero")
    assert "took longer than 5 s" in table.error[0] and gone(int(open(path).read()))


def test_answers_of_messages():
    chat = [{"role": "user", "content": "2+2"}]
    assert score(exact({"2+2": 4}), [chat], [" 4 "]).reward.tolist() == [1.0]
    assert follows_schema({"type": "array"}, parses=0.5)(chat, "{}") == 0.5

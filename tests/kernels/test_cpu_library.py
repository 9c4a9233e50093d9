"The compiled kernel's library is loaded only if nobody else could have written it, and as it was made."
import ctypes, logging, os, shutil, stat, subprocess

import pytest
import torch

from bmlab.kernels import cpu, cpu_block, cpu_experts

COMPILER = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
FLAGS = cpu._FLAGS[1]
pytestmark = pytest.mark.skipif(COMPILER is None or not cpu.available(), reason="no C compiler, or no AVX2")
TRAP = '#include <stdlib.h>\n__attribute__((constructor)) static void trap(void) { system("touch %s"); }\n'


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    "(folder, a library that was made there)"
    folder = tmp_path_factory.mktemp("made")
    cpu._made([COMPILER], FLAGS, folder)
    return folder, next(folder.glob("cpu-*.so"))


@pytest.fixture(scope="module")
def trap(tmp_path_factory):
    "(a library that runs a command as soon as it is loaded, the file that this leaves)"
    there = tmp_path_factory.mktemp("trap")
    (there / "trap.c").write_text(TRAP % (there / "sprung"))
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", there / "trap.so", there / "trap.c"], check=True)
    return there / "trap.so", there / "sprung"


@pytest.fixture
def compiled(library, monkeypatch):
    "The compiler's calls; it gives the library that it gave before, which saves seconds"
    calls, run, made = [], subprocess.run, library[1].read_bytes()
    def compiles(command, **kw):
        if "-shared" not in command: return run(command, **kw)
        calls.append(command)
        with open(command[command.index("-o") + 1], "wb") as f: f.write(made)
        return subprocess.CompletedProcess(command, 0)
    monkeypatch.setattr(cpu.subprocess, "run", compiles)
    return calls


@pytest.fixture
def folder(library, compiled, tmp_path):
    "A copy of that folder"
    shutil.copytree(library[0], tmp_path / "kernels")
    return tmp_path / "kernels", tmp_path / "kernels" / library[1].name


def test_what_was_made_is_loaded_again_and_not_compiled(folder, compiled):
    assert cpu._agrees(cpu._made([COMPILER], FLAGS, folder[0])) and not compiled


def planted_content(file, trap): shutil.copy(trap, file)
def planted_link(file, trap):
    file.unlink()
    file.symlink_to(trap)
def cut(file, trap): os.truncate(file, file.stat().st_size // 2)
def zeroed(file, trap): file.write_bytes(bytes(file.stat().st_size))
def written_by_others(file, trap): file.chmod(0o777)
def written_by_the_group(file, trap): file.chmod(0o775)


@pytest.mark.parametrize("plant", (planted_content, planted_link, cut, zeroed, written_by_others, written_by_the_group))
def test_a_library_of_another_hash_or_mode_is_made_again(folder, trap, plant, compiled, caplog):
    where, file = folder
    plant(file, trap[0])
    with caplog.at_level(logging.WARNING): made = cpu._made([COMPILER], FLAGS, where)
    assert "is not loaded: " in caplog.text and cpu._agrees(made)
    assert len(compiled) == 1 and not trap[1].exists()
    assert stat.S_IMODE(file.stat().st_mode) == 0o755 and not file.is_symlink()
    caplog.clear()
    cpu._made([COMPILER], FLAGS, where)
    assert not caplog.text                                                  # and what was made is loaded from now on


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_library_of_another_user_is_not_loaded(folder, trap, caplog):
    where, file = folder
    os.chown(file, 12345, 12345)
    with caplog.at_level(logging.WARNING): assert cpu._agrees(cpu._made([COMPILER], FLAGS, where))
    assert "belongs to user 12345" in caplog.text and file.stat().st_uid == 0


def open_to_all(folder): folder.chmod(0o777)
def open_to_the_group(folder): folder.chmod(0o770)
def given_away(folder): os.chown(folder, 12345, -1)


@pytest.mark.parametrize("spoil", (open_to_all, open_to_the_group, given_away))
def test_a_folder_that_others_can_write_to_is_not_used(folder, spoil, tmp_path, monkeypatch, caplog):
    "The kernel is compiled in a place of this process alone, though a library of the right name and hash is there"
    try: spoil(folder[0])
    except PermissionError: pytest.skip("only root gives folders away")
    monkeypatch.setenv("BMLAB_CACHE", str(tmp_path))
    loaded, real = [], cpu._made
    monkeypatch.setattr(cpu, "_made", lambda c, flags, where, text: loaded.append(where) or real(c, flags, where, text))
    with caplog.at_level(logging.WARNING): made = cpu._kernel.__wrapped__()
    assert "for this process alone" in caplog.text and loaded[0] == folder[0] and loaded[1] != folder[0]
    assert made is not None


def test_a_trap_springs_where_it_is_loaded(trap):
    "The test's own test: what was planted above would have run"
    ctypes.CDLL(str(trap[0]))
    assert trap[1].exists()


X86 = os.uname().machine == "x86_64"


@pytest.mark.skipif(not X86, reason="no x86")
@pytest.mark.parametrize("level", ["haswell", "alderlake", "cascadelake"])
def test_each_instruction_set_has_its_text(level):
    "AVX2 alone, AVX-VNNI, AVX-512 VNNI; on any machine they compile, without a warning"
    for text in ("cpu", "cpu_experts", "cpu_adamw"):                                 # (the second has cpu_block in it)
        source = os.path.join(os.path.dirname(cpu.__file__), f"{text}.c")
        command = [COMPILER, "-O0", "-Wall", f"-march={level}", "-S", "-o", os.devnull, "-x", "c", source]
        done = subprocess.run(command, capture_output=True, text=True)
        if "bad value" in done.stderr or "unknown target" in done.stderr: pytest.skip(f"{COMPILER} has no {level}")
        assert done.returncode == 0
        assert not [line for line in done.stderr.splitlines() if "warning" in line and "unknown-pragmas" not in line]


@pytest.mark.skipif(not X86, reason="no x86")
def test_processors_with_avx2_alone_give_the_same_numbers(tmp_path):
    "every code and every digit, those whose products are largest too"
    made = cpu._made([COMPILER], ("-march=haswell",), tmp_path)
    own = cpu._kernel()
    assert cpu._agrees(made)
    torch.manual_seed(0)
    K, N = 416, 9
    many = torch.randn(43, K) * 10                                      # a prompt's rows, rounded to int8
    for M in (1, 2, 3, 5):
        x = torch.randn(M, K)
        # (digits, the lowest first: the high one is ±127; -128, -128, 0; 127, 127, 0)
        x[0, ::4], x[0, 1::4], x[0, 2::4], x[-1, 3::4] = -8_350_000, -32_896, -32_896, 32_639
        x[-1, 0] = 8_350_000
        x[0], x[-1] = x[0].round(), x[-1].round()                        # (in whole units)
        codes = torch.randint(-128, 128, (N, K)).to(torch.int8)
        codes[0], codes[1], scale = -128, 127, torch.rand(N) + 0.1
        got, same = (cpu._run(of.int8_rows, x, (codes, scale)) for of in (made, own))
        assert torch.equal(got, same)
        wide = codes.double() * scale[:, None].double()
        off = (got - x.double() @ wide.T).abs() / (x.double().abs() @ wide.abs().T)
        assert off.max() < 3e-7, off
        for bits in (4, 3, 2):
            for g in (32, 64, 128):
                K4 = 384
                packed = torch.randint(0, 256, (N, K4 // 8 * bits), dtype=torch.uint8)
                packed[0] = 255
                halves = torch.rand(N, K4 // g).half() + 0.1
                matrix = packed, halves, halves.flip(0).contiguous()
                got, same = (cpu._run(of.group_rows, x[:, :K4].contiguous(), matrix, g, bits) for of in (made, own))
                assert torch.allclose(got, same, rtol=1e-6, atol=1e-6 * got.abs().max())
                x4 = many[:, :K4].contiguous()
                got, same = (cpu._run(of.rounded_rows, x4, matrix, g, bits) for of in (made, own))
                assert torch.allclose(got, same, rtol=1e-5, atol=1e-5 * got.abs().max())
    got, same = (cpu._run(of.rounded_rows, many, (codes, scale, None), 0, 8) for of in (made, own))
    assert torch.equal(got, same)                                       # (whole numbers in blocks of 32)


DIRTY = """#include <stdint.h>
void dirty(uint32_t word) {
    volatile uint32_t stack[1 << 17];
    for (int i = 0; i < 1 << 17; i++) stack[i] = word;
}
"""


@pytest.fixture(scope="module")
def dirty(tmp_path_factory):
    "What fills half a MiB of the stack below with a word"
    there = tmp_path_factory.mktemp("dirty")
    (there / "dirty.c").write_text(DIRTY)
    command = [COMPILER, "-O1", "-shared", "-fPIC", "-fno-stack-clash-protection"]
    subprocess.run([*command, "-o", there / "dirty.so", there / "dirty.c"], check=True)
    return ctypes.CDLL(str(there / "dirty.so")).dirty


def grouped(N, K, g, bits):
    "(codes, scales and zero points, what they stand for in float64)"
    codes = torch.randint(0, 256, (N, K // 8 * bits)).to(torch.uint8)
    scale, zero = torch.rand(N, K // g).half() + 0.1, torch.randn(N, K // g).half()
    wide = (cpu._unpacked(codes.view(N, K // g, -1), g, bits) - 2**(bits - 1)) * scale[..., None] + zero[..., None]
    return (codes, scale, zero), wide.flatten(1)


def products(x, matrix, wide, g, bits):
    "(a product, how far it is off in units of what its rounding may make) of each way"
    ways = (("exact", cpu._kernel().group_rows, x), ("rounded", cpu._kernel().rounded_rows, cpu.round_blocks(x, g)))
    for name, call, same in ways if len(x) <= cpu.MAX_ROWS else ways[1:]:
        got, same = cpu._run(call, x, matrix, g, bits), same.double()
        e = 2**-8 if x.dtype is torch.bfloat16 else 3e-6
        yield name, got, (got.double() - same @ wide.T).abs() / (e * same.abs() @ wide.abs().T)


SIZES = [(g, K, bits) for g, K in ((32, 32), (32, 96), (32, 160), (32, 288), (64, 64), (64, 192), (64, 576), (128, 384))
         for bits in (4, 3, 2)]


@pytest.mark.parametrize("word", [0xffffffff, 0x7f800000], ids=["nan", "infinity"])
@pytest.mark.parametrize("g,K,bits", SIZES)
def test_what_lay_on_the_stack_reaches_no_product(g, K, bits, word, dirty):
    torch.manual_seed(0)
    run = cpu._run
    def on_dirt(*args):
        dirty(word)
        return run(*args)
    for N in (1, 5, 8, 16, 24):
        matrix, wide = grouped(N, K, g, bits)
        for M in (1, 2, 3, 4, 7, 16, 20):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(M, K).to(dtype)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(cpu, "_run", on_dirt)
                    for name, got, off in products(x, matrix, wide, g, bits):
                        assert off.max() < 1, (name, N, M, dtype, off)


@pytest.mark.parametrize("g,K,bits", SIZES)
def test_a_row_of_codes_whose_scales_are_odd_spoils_no_other(g, K, bits):
    torch.manual_seed(0)
    N = 13
    matrix, wide = grouped(N, K, g, bits)
    odd, rest = [0, 3, 8, 12], [1, 2, 4, 5, 6, 7, 9, 10, 11]
    for word in (float("nan"), float("inf")):
        matrix[1][odd] = matrix[2][odd] = word
        for M in (1, 2, 3, 7, 20):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(M, K).to(dtype)
                for name, got, off in products(x, matrix, wide, g, bits):
                    assert off[:, rest].max() < 1 and got[:, odd].isnan().all(), (name, M, dtype, off)


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="no x86")
def test_experts_with_avx2_alone(tmp_path):
    assert cpu_experts._agrees(cpu._made([COMPILER], ("-march=haswell", "-fopenmp"), tmp_path, "cpu_experts"))


@pytest.mark.parametrize("name", ["_Matrix", "_Block", "_Tokens"])
def test_structs_that_are_not_those_of_c_are_refused(name, monkeypatch, caplog):
    assert cpu_block._agrees(cpu_block._kernel())
    own = getattr(cpu_block, name)
    longer = type(name, (ctypes.Structure,), {"_fields_": [*own._fields_, ("more", ctypes.c_int64)]})
    monkeypatch.setattr(cpu_block, name, longer)
    with caplog.at_level(logging.INFO): assert cpu_block._kernel.__wrapped__() is None
    assert "no kernel of cpu_block.c that works here" in caplog.text

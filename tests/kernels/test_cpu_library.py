"The compiled kernel's library is loaded only if nobody else could have written it, and as it was made."
import logging, os, shutil, stat, subprocess

import pytest

from bmlab.kernels import cpu

COMPILER = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
FLAGS = cpu._FLAGS[1]
pytestmark = pytest.mark.skipif(COMPILER is None or not cpu.available(), reason="no C compiler, or no VNNI")
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
    import ctypes
    ctypes.CDLL(str(trap[0]))
    assert trap[1].exists()

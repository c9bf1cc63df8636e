"""Worker processes: jobs, messages, errors, ends."""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gear_offline.analysis.doctor import probe
from gear_offline.core.workers import Worker, WorkerPool
from gear_offline.errors import GearError, InputError
from tests.support import Patch, one_error
from tests.trust.kills import is_gone

JOBS = "tests.worker_jobs"


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def test_an_error_keeps_its_class_and_the_worker_goes_on(worker: Worker) -> None:
    worker.start(f"{JOBS}:fail", "input")
    with pytest.raises(InputError) as caught:
        worker.receive()
    assert (caught.value.code, caught.value.where) == ("COLUMN", "here")
    assert str(caught.value) == str(InputError("COLUMN", "not a column", "here", "name one"))
    for how, text in (("other", "KeyError: 'no such key'"), ("result", "pickle")):
        worker.start(f"{JOBS}:fail", how)
        with one_error("INTERNAL", text) as internal:
            worker.receive()
        assert "Traceback" in internal.value.__notes__[0]
    worker.start(f"{JOBS}:no_such_job")
    with pytest.raises(GearError, match="no_such_job"):
        worker.receive()
    worker.start(f"{JOBS}:add", 1)
    assert worker.receive() == 1


def test_a_dead_worker_says_how_it_died() -> None:
    ends = {"exit": "exit code 3: last words", "leave": "exit code 1: last words"}
    for how, text in {**ends, "kill": "killed by SIGKILL"}.items():
        with Worker() as worker:
            worker.start(f"{JOBS}:fail", how)
            with one_error("WORKER_LOST", text):
                worker.receive()
            assert not worker.busy
            with pytest.raises(GearError, match=text):
                worker.start(f"{JOBS}:add")


def test_a_worker_that_cannot_start_says_what_to_do(monkeypatch: Patch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    try:
        for more in range(5):  # a pipe, what is printed, and what `subprocess` opens
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, hard))
            with one_error("WORKER_LOST", "Too many open files; allow more open files: ulimit -n"):
                Worker()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert os.dup(0) == lowest, "it leaves nothing open"
            os.close(lowest)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(tempfile, "tempdir", "/none")
    with one_error("WORKER_LOST", "No such file or directory; .*TMPDIR=FOLDER"):
        Worker()


def test_a_worker_imports_nothing_of_the_folder_it_stands_in(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Its path is its caller's: parts that lie there go on working where the caller finds them."""
    for name in ("random.py", "numpy.py", "gear_offline/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('imported')")
    (tmp_path / "mine.py").write_text("def job(caller): return 7")
    monkeypatch.chdir(tmp_path)
    with Worker() as worker:
        worker.start(f"{JOBS}:add", 1, 2)
        assert worker.receive() == 3
        worker.start("mine:job")
        with one_error("INTERNAL", "No module named 'mine'"):
            worker.receive()
    assert probe("facts['path'] = __import__('random').__file__").works
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, ""])  # `import` passes a Path by
    with Worker() as worker:
        worker.start("mine:job")
        assert worker.receive() == 7
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with Worker() as worker, one_error("WORKER_LOST", "imported") as caught:
        worker.start(f"{JOBS}:add", 1)
        worker.receive()
    assert "memory" not in caught.value.remedy


def test_making_an_environment_runs_nothing_of_the_folder_it_stands_in(tmp_path: Path) -> None:
    """Importing mujoco imports glfw, which starts Python that imports ctypes."""
    (tmp_path / "ctypes.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'w').close()")
    code = "from gear_offline.evaluation.environments import make_environment as make\n"
    code += "make('Pendulum-v1').close()"
    paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-P", "-c", code]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **paths}, check=True)
    assert not (tmp_path / "RAN").exists()


def test_a_worker_is_given_its_threads() -> None:
    for threads, expected in ((2, "2"), (None, os.environ.get("OMP_NUM_THREADS"))):
        with Worker(threads=threads) as worker:
            worker.start(f"{JOBS}:threads")
            assert worker.receive() == expected


def test_a_worker_ends_when_it_is_closed_or_interrupted(worker: Worker) -> None:
    with Worker() as closed:
        closed.start(f"{JOBS}:sleep")
        assert closed.receive() == closed.pid
    assert is_gone(closed.pid)
    closed.close()  # again: nothing
    worker.start(f"{JOBS}:sleep")
    worker.receive()
    worker.interrupt()
    with pytest.raises(GearError, match="SIGTERM"):
        worker.receive()


def test_a_worker_dies_with_its_caller_and_ctrl_c_does_not_reach_it() -> None:
    command = [sys.executable, "-m", "tests.worker_jobs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        assert os.getpgid(pid) != os.getpgid(program.pid)
        program.kill()
    assert is_gone(pid)


def test_a_job_that_fails_ends_the_others() -> None:
    for how, code in {"input": "COLUMN", "kill": "WORKER_LOST"}.items():
        with WorkerPool(2) as pool, one_error(code):
            list(pool.run(f"{JOBS}:fail", [(how,)] * 3))

"""Every test sees eight simulated CPU devices, and a thread pool large enough that two meshes of
them run at once.
"""

import ctypes
import fcntl
import gc
import importlib.util
import logging
import os
import secrets
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jaxtyping
import pytest
from annotation_checks import check_annotations
from hypothesis import HealthCheck, settings

# Annotations are checked at run time in all modules that have shapes. Elsewhere, where the type checker
# suffices, it would make a call twenty times as slow.
PACKAGE = Path(__file__).parents[1] / "areal_jax"
# The hook decorates with the function of this name. JAXTYPING_DISABLE=1 turns the checks off, which
# saves an eighth of the time of tests that trace and compile.
if not jaxtyping.config.jaxtyping_disable:
    jaxtyping.jaxtyped = lambda *, typechecker: check_annotations
    jaxtyping.install_import_hook(
        [
            ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            for path in PACKAGE.rglob("*.py")
            if "from jaxtyping import" in path.read_text(encoding="utf-8")
        ],
        "beartype.beartype",
    )

# jax reads its settings when it is imported.
assert "jax" not in sys.modules, "expected jax not to be imported before its settings are made"
# Set before jax loads: simulated devices deadlock in XLA's collectives when the pool has fewer
# threads than they need.
os.environ["JAX_PLATFORMS"] = "cpu"
# Half the time to compile: no emitters of fusions, and one module of LLVM per program. Later versions
# have no such choice of emitters, so that those are tried with them.
QUICK_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):
    QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 "
    f"{QUICK_FLAGS}".strip()
)
# Most tests compile more than they compute. With 0 here, programs are those of a user, as they are
# where there are compilers of accelerators.
has_compilers = any(map(importlib.util.find_spec, ("libtpu", "jax_cuda13_plugin")))
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "0" if has_compilers else "1")
os.environ["NPROC"] = "16"
# Many tests compile the same small programs, in processes of their own too: each is compiled once,
# and not again by later runs. jax's own limit of the size would list the folder at every write.
XLA_CACHE = Path(__file__).parents[1] / ".pytest_cache" / "xla"
if (
    "PYTEST_XDIST_WORKER" not in os.environ
    and XLA_CACHE.exists()
    and sum(path.stat().st_size for path in XLA_CACHE.iterdir()) > 1 << 30
):
    shutil.rmtree(XLA_CACHE)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(XLA_CACHE))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = "-1"
# Ray runs the code of every client that has this token. Read when ray is imported.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# By default its workers have a low priority, with which they hardly run beside other tests.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (the name that Ray reads)

# No deadline: the duration of an example depends on the load of the machine.
settings.register_profile(
    "without clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("without clocks")

# Tests of extras that have environments of their own: `jetstream` brings TensorFlow, `tpu` the
# compilers of TPUs, `gpu` those of GPUs, the trackers pandas and Flask, the documentation MkDocs
# and a kernel, Tinker's client transformers, and environments puzzles and games.
collect_ignore = [
    folder
    for folder, library in (
        ("orchestrator", "jetstream"),
        ("compile_only", "libtpu"),
        ("compile_only_gpu", "jax_cuda13_plugin"),
        ("environments/test_reasoning_gym.py", "reasoning_gym"),
        ("environments/test_packages.py", "textarena"),
        ("verifiers_client", "verifiers"),
        ("trackers", "mlflow"),
        ("documentation", "mkdocs"),
        ("tinker_client", "tinker"),
    )
    if not importlib.util.find_spec(library)
]
os.environ["TPU_SKIP_MDS_QUERY"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parts", metavar="K,K/N", help="of the slow tests run only these of N parts")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (parts := config.getoption("--parts")):
        return
    numbers, _, num_parts = parts.partition("/")
    chosen = {*map(int, numbers.split(","))}

    def is_chosen(item: pytest.Item) -> bool:
        # Whole files, whose tests share fixtures and programs; a file stays in its part.
        part = zlib.crc32(item.nodeid.partition("::")[0].encode()) % int(num_parts) + 1
        return part in chosen or item.get_closest_marker("slow") is None

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = filter(is_chosen, items)


def pytest_collection_finish() -> None:
    """Collect garbage less often, and not among the modules and tests of the process.

    To trace and lower programs makes many small objects: this saves a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def run_metrics_are_documented(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that every metric of the runs in a test's `tmp_path` is in the table of metrics."""
    # Requested before the test, so that it is torn down after this fixture.
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if folder is None:
        return
    from areal_jax.metrics.jsonl import read
    from areal_jax.metrics.table import find_undocumented

    for path in folder.rglob("metrics.jsonl"):
        if (path.parent / "config.json").exists():
            written = {name for row in read(path) for name in row} - {"version", "time_s"}
            assert not find_undocumented(written), path


@pytest.fixture(scope="module", autouse=True)
def bounded_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free what a file of tests has cached, and the compiled programs of the process, if it has
    grown to 2 GiB.

    Without this a process that runs half of all tests grows to more than 5 GiB.
    """
    yield
    if _resident_bytes() > 2 << 30:
        _free_programs(request)


@pytest.fixture(autouse=True)
def bounded_mappings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free them after a test, too, if the process has grown to 20 000 mappings of memory.

    A program of jax 0.12 has many, and LLVM aborts the process when Linux allows no more (65 530).
    """
    global resident_at_count
    yield
    # A process with so many is larger than 1 GiB. To count them takes 10 ms.
    resident = _resident_bytes()
    if resident > max(1 << 30, resident_at_count + (16 << 20)):
        resident_at_count = resident
        if Path("/proc/self/maps").read_bytes().count(b"\n") > 20_000:
            _free_programs(request)


resident_at_count = 0
"""Memory that the process held when its mappings were counted."""


def _resident_bytes() -> int:
    """Return the memory that the process holds; 0 where there is no /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _free_programs(request: pytest.FixtureRequest) -> None:
    global resident_at_count
    resident_at_count = 0
    for each in vars(request.module).values():
        is_own = getattr(each, "__module__", None) == request.module.__name__
        if is_own and hasattr(each, "cache_clear"):
            each.cache_clear()
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        with warnings.catch_warnings():
            # What is collected here may be of any file before this one.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def no_compilation_cache() -> Iterator[None]:
    """Compile every program: XLA on CPU cannot serialize one that it has read from its cache."""
    import jax
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    jax.config.update("jax_enable_compilation_cache", False)
    # jax decides once whether it uses the cache.
    reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    reset_cache()


@pytest.fixture(scope="session")
def of_a_command() -> dict[str, str]:
    """Return the environment of a subprocess: this package and one device."""
    kept = {name: value for name, value in os.environ.items() if name != "NPROC"}
    here = {"PYTHONPATH": str(Path(__file__).parents[1])}
    return kept | here | {"XLA_FLAGS": QUICK_FLAGS}


@pytest.fixture(scope="session")
def object_store_environment() -> Iterator[dict[str, str]]:
    """Start emulators of object stores; the environment that leads to them."""
    from object_stores import object_stores

    with object_stores() as environment:
        yield environment


@pytest.fixture(params=[pytest.param(each, marks=pytest.mark.slow) for each in ("gs", "s3")])
def bucket(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    object_store_environment: dict[str, str],
) -> str:
    """Return the URL of an empty folder in each object store."""
    for name, value in object_store_environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AREAL_JAX_CACHE", str(tmp_path / "cache"))
    return f"{request.param}://bucket/{secrets.token_hex(4)}"


@pytest.fixture(autouse=True)
def alone_with_ray(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait until no other test process has a run on Ray, which compiles in six processes."""
    if request.node.get_closest_marker("ray_run") is None:
        yield
        return
    XLA_CACHE.parent.mkdir(exist_ok=True)
    with (XLA_CACHE.parent / "ray.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        # Forked processes have the file, too.
        fcntl.flock(file, fcntl.LOCK_UN)


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """Start a Ray cluster for the module, with a small object store that does not spill to disk."""
    import ray

    with warnings.catch_warnings():
        # It starts processes that it does not keep in view.
        warnings.simplefilter("ignore", ResourceWarning)
        # What is forked here becomes another program at once.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _system_config={
                "automatic_object_spilling_enabled": False,
                "local_fs_capacity_threshold": 0.0,
                "oom_grace_period_s": 0,
            },
        )
        gc.collect()
    yield
    ray.shutdown()

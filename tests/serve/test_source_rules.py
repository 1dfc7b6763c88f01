"""What the source must not hold: rules of SECURITY.md that are read off the code itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mars_ray

ROOT = Path(mars_ray.__file__).parent
SOURCES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}

PROGRAMS = {
    str(path): ast.parse(path.read_text())
    for folder in ("pipelines", "benchmarks")
    for path in sorted((ROOT.parent / folder).rglob("*.py"))
}


def imports_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls_in(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call, by its name as written: `eval`, `torch.load`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def files_that_import(*names: str) -> set[str]:
    return {
        file
        for file, tree in SOURCES.items()
        for imported in imports_in(tree)
        if any(imported == name or imported.startswith(f"{name}.") for name in names)
    }


def test_pickles_are_read_only_from_the_socket_pair_of_an_engine_and_its_parent() -> None:
    """Both ends of it are held by a process and its child (`socket.socketpair`); no network reaches it. Jobs on Ray
    read what their own driver handed them."""
    unpickling = files_that_import("pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "zmq", "jsonpickle")
    # Ray pickles what a driver hands its workers; theirs are bytes so that who passes them on need not read them.
    of_a_job = {"batch/ray/decoder.py", "batch/ray/generate_files.py", "batch/ray/processor.py"}
    assert unpickling == {"engine/process/messages.py"} | of_a_job
    names = {"torch.load", "torch.compiler.load_compiled_function"}
    loading = {file for file, tree in SOURCES.items() for name, _ in calls_in(tree) if name in names}
    assert loading == set()


@pytest.mark.platform
def test_the_sockets_of_an_engine_are_a_pair_and_nothing_of_ours_listens_or_connects() -> None:
    names = {"listen", "connect", "create_connection", "create_server", "start_server", "start_unix_server"}
    found = {
        (file, name)
        for file, tree in SOURCES.items()
        if file.startswith(("serve/", "platform/", "engine/"))
        for name, call in calls_in(tree)
        if name.split(".")[-1] in names
        or (name.endswith("open_connection") and [word.arg for word in call.keywords] != ["sock"])
    }
    own = {("serve/ray/run_endpoint.py", "connect"), ("platform/responses/response_store.py", "sqlite3.connect")}
    assert found == own, "one is of ray_cluster, one opens a file"
    assert "socket.socketpair" in {name for name, _ in calls_in(SOURCES["engine/process/async_engine.py"])}


def test_no_text_is_ever_run_as_code_or_by_a_shell() -> None:
    forbidden = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"}
    sandboxed = "evaluation/sandboxed_program.py"
    found = [
        (file, name)
        for file, tree in SOURCES.items()
        for name, call in calls_in(tree)
        if (name in forbidden and file != sandboxed)
        or name.endswith("create_subprocess_shell")
        or any(word.arg == "shell" for word in call.keywords)
    ]
    assert found == []
    assert not files_that_import("mars_ray.evaluation.sandboxed_program"), "only bubblewrap runs it"


def test_yaml_is_read_by_loaders_that_make_plain_values_only() -> None:
    for file, tree in SOURCES.items():
        for name, call in calls_in(tree):
            if name in ("yaml.load", "yaml.load_all"):
                assert [ast.unparse(word.value) for word in call.keywords] == ["yaml.BaseLoader"], file
            assert not name.startswith(("yaml.unsafe", "yaml.full")), file


@pytest.mark.platform
def test_the_endpoint_makes_no_requests_but_for_the_keys_of_a_provider() -> None:
    clients = ("requests", "urllib.request", "urllib3", "http", "httpx", "httpx2", "aiohttp", "websockets", "ftplib")
    found = files_that_import(*clients, "smtplib", "huggingface_hub")
    served = ("serve/", "platform/", "engine/")
    assert [file for file in found if file.startswith(served)] == ["platform/accounts/provider_keys.py"]
    users = files_that_import("mars_ray.platform.accounts.provider_keys")
    assert users == {"platform/accounts/callers.py"}, "which makes them only with `oidc`"
    jwks_clients = {file for file, tree in SOURCES.items() if "PyJWKClient" in ast.unparse(tree)}
    assert jwks_clients == {"platform/accounts/provider_keys.py"}, "which bounds how often it fetches"
    types = {name for file, tree in SOURCES.items() for name in imports_in(tree) if name.split(".")[0] == "openai"}
    assert types and all(name.startswith("openai.types") for name in types - {"openai", "openai.BaseModel"})


def test_remote_code_is_never_trusted() -> None:
    given = [
        word.value
        for tree in (SOURCES | PROGRAMS).values()
        for _, call in calls_in(tree)
        for word in call.keywords
        if word.arg == "trust_remote_code"
    ]
    assert given
    assert all(isinstance(value, ast.Constant) and value.value is False for value in given)
    readers = [
        (file, call)
        for file, tree in (SOURCES | PROGRAMS).items()
        for name, call in calls_in(tree)
        if name.endswith((".from_pretrained", ".from_config"))
    ]
    assert len(readers) > 5
    assert [file for file, call in readers if "trust_remote_code" not in {word.arg for word in call.keywords}] == []
    texts = [
        (file, node.value)
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value == "trust_remote_code"
    ]
    assert texts == [], "no settings from elsewhere turn it on"


def test_a_python_started_from_here_imports_nothing_from_the_working_directory() -> None:
    """`python -m` looks there first; somebody may stand in the folder of a stranger's model."""
    started = [
        [ast.unparse(each) for each in node.elts[place : place + 3]]
        for tree in SOURCES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.List | ast.Tuple)
        for place, each in enumerate(node.elts)
        if ast.unparse(each) == "sys.executable"
    ]
    assert len(started) >= 4
    assert [words for words in started if words[1:] != ["'-P'", "'-m'"]] == []

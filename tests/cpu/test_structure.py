"""What the layout promises: who imports whom, what is public, how large things are, what an import loads."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from helpers.package_source import PACKAGE, SourceFile, package_files

import graphcap_backend

FILES = package_files()

# A module imports its own layer and those below it, never one above: backend -> capture -> annotate -> leafs.
LAYERS = [
    {"errors"},
    {"options", "files", "fx_traces", "call_patches"},
    {"compiled_graphs"},
    {"inductor"},
    {"annotate"},
    {"capture"},
    {"backend", "report"},
    {"show"},
    {"", "demo", "__main__"},
]

# What a user asks of an object of a lower layer; imported when it is called, or for types alone.
CONVENIENCES = {"report": {"show.page", "show.profile"}}

# Who may call CUPTI, and for what.
CALLS_CUPTI = {
    "annotate.cupti": "ctypes on libcupti: the subscription, node ids",
    "annotate.activities": "cupti-python: activity records; takes and gives the subscription through annotate.cupti",
}

# Longer than 400 lines, and why that is still one noun.
LONG_MODULES: dict[str, str] = {
    "inductor": "all that knows Inductor's internals is in one place: what a new torch release can break",
}
# Longer than 60 lines, and why it can't be said in steps.
LONG_FUNCTIONS: dict[str, str] = {}


def _layer(module: str) -> int:
    top = module.partition(".")[0]
    found = [level for level, members in enumerate(LAYERS) if top in members]
    assert found, f"{PACKAGE}.{module} is in no layer: add it to LAYERS and to DESIGN.md"
    return found[0]


def _modules_imported(file: SourceFile) -> set[str]:
    known = {other.name for other in FILES}
    names = (name.removeprefix(PACKAGE).lstrip(".") for name in file.imports() if name.split(".")[0] == PACKAGE)
    return {name for name in names if name in known and name}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.where)
def test_imports_point_down(file: SourceFile) -> None:
    upward = {name for name in _modules_imported(file) if _layer(name) > _layer(file.name)} - CONVENIENCES.get(
        file.name, set()
    )
    assert not upward, f"{file.where} imports {sorted(upward)} of a higher layer"


def test_leafs_import_leafs_only() -> None:
    by_name = {file.name: file for file in FILES}
    assert _modules_imported(by_name["errors"]) == set()
    assert _modules_imported(by_name["options"]) <= {"errors"}
    assert _modules_imported(by_name["fx_traces"]) == _modules_imported(by_name["call_patches"]) == set()
    assert _modules_imported(by_name["compiled_graphs"]) == {"fx_traces"}
    assert _modules_imported(by_name["inductor"]) <= {
        "errors",
        "options",
        "fx_traces",
        "call_patches",
        "compiled_graphs",
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.where)
def test_only_one_file_knows_inductor(file: SourceFile) -> None:
    if file.name == "inductor":
        return
    private = {name for name in (*file.imports(), *file.attributes()) if name.startswith("torch._inductor")}
    assert not private, f"{file.where} uses {sorted(private)}; only inductor.py may"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.where)
def test_only_listed_files_call_cupti(file: SourceFile) -> None:
    if file.name in CALLS_CUPTI:
        return
    imports = set(file.imports())
    assert not {name for name in imports if name.split(".")[0] == "cupti"}, f"{file.where} imports cupti-python"
    if "ctypes" in imports:
        named = {
            node.value
            for node in ast.walk(file.tree)
            if isinstance(node, ast.Constant) and "libcupti" in str(node.value)
        }
        assert not named, f"{file.where} uses ctypes and names libcupti; see CALLS_CUPTI"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.where)
def test_modules_and_functions_stay_readable(file: SourceFile) -> None:
    num_lines = len(file.text.splitlines())
    assert num_lines <= 400 or file.name in LONG_MODULES, (
        f"{file.where} has {num_lines} lines: split it, or say why not"
    )
    for function in file.functions():
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        name = f"{file.name}.{function.name}"
        assert length <= 60 or name in LONG_FUNCTIONS, f"{file.where}:{function.lineno}: {name} has {length} lines"


def test_public_names_are_sorted_and_load() -> None:
    assert graphcap_backend.__all__ == sorted(graphcap_backend.__all__)
    assert dir(graphcap_backend) == graphcap_backend.__all__
    for name in graphcap_backend.__all__:
        value = getattr(graphcap_backend, name)
        assert getattr(value, "__name__", name) == name
    assert callable(graphcap_backend.report)  # and not the module of that name


def test_type_checkers_see_the_same_names() -> None:
    imported = {
        alias.asname or alias.name
        for node in ast.walk(FILES[0].tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE)
        for alias in node.names
    }
    assert imported | {"__version__"} == set(graphcap_backend.__all__)


def test_every_error_is_public() -> None:
    from graphcap_backend import errors

    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined <= set(graphcap_backend.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'grahp'"):
        _ = graphcap_backend.grahp  # type: ignore[attr-defined]


def _loaded_after(statement: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after ``statement``; it also checks that CUDA is untouched."""
    program = f"""
import sys
{statement}
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized(), "CUDA was initialised"
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_no_torch() -> None:
    loaded = _loaded_after("import graphcap_backend; dir(graphcap_backend); graphcap_backend.GraphcapError")
    assert not {name for name in loaded if name.split(".")[0] in ("torch", "cuda", "cupti", "triton", "numpy")}


def test_importing_every_module_loads_no_cuda_and_no_compiler() -> None:
    names = [f"{PACKAGE}.{file.name}".rstrip(".") for file in FILES if file.name != "__main__"]
    ours = _loaded_after("import torch\n" + "\n".join(f"import {name}" for name in names))
    heavy = ours - _loaded_after("import torch")
    prefixes = ("torch._inductor", "torch._dynamo", "cuda", "cupti", "triton")
    assert not {name for name in heavy if name.startswith(prefixes)}

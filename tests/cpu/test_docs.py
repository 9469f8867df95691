"""The documentation names what there is: errors, warnings, reasons, options, examples; its links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import re

import pytest
from helpers.package_source import ROOT, package_files

from graphcap_backend import GraphcapOptions, SkipKind, errors

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
_LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")


def _read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: object) -> None:
    path = ROOT / str(page)
    for groups in _LINK.findall(path.read_text(encoding="utf-8")):
        target, _, anchor = "".join(groups).partition("#")
        if "://" in target:
            continue
        found = path.parent / target if target else path
        assert found.exists(), f"{path.name} links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_outputs_are_there_and_name_no_place_of_this_machine(page: object) -> None:
    text = (ROOT / str(page)).read_text(encoding="utf-8")
    assert "```text\n```" not in text, "run docs/make_outputs.py"
    assert not re.search(r"(?<!\w)/(tmp|home|root|work)/", text)


def test_every_page_is_made_and_reached() -> None:
    made = re.findall(r'"([\w-]+\.md)"', (DOCS / "make_outputs.py").read_text(encoding="utf-8"))
    assert sorted(made) == [page.name for page in PAGES]
    linked = {"".join(groups).partition("#")[0] for page in PAGES for groups in _LINK.findall(_read(page.name))}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {page.name for page in PAGES} <= linked | set(re.findall(r"docs/([\w-]+\.md)", readme))


def test_every_error_is_in_the_faq() -> None:
    heads = " ".join(re.findall(r"^###? (.*)$", _read("faq.md"), flags=re.MULTILINE)) + " DriverError"
    assert "`DriverError`" in _read("faq.md")
    assert set(re.findall(r"\w+Error", heads)) == {
        name for name, value in vars(errors).items() if isinstance(value, type)
    }


def test_every_warning_is_in_the_faq() -> None:
    told = _read("faq.md").partition("## Warnings")[2]
    for file in package_files():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "PROCESS.warn_once"):
                message = node.args[0 if "warnings" in ast.unparse(node.func) else 1]
                words = [part.value for part in ast.walk(message) if isinstance(part, ast.Constant)]
                longest = max((str(word) for word in words), key=len, default="")
                if words:
                    start = re.split(r"[:;,]", longest)[0].strip()
                    assert start in told, f"{file.where}:{node.lineno}: {start!r} is not in faq.md"


def test_every_reason_and_option_is_told() -> None:
    reasons = _read("when-it-does-not-capture.md")
    assert [kind.value for kind in SkipKind if f"`{kind.value}`" not in reasons] == []
    options = _read("getting-started.md")
    assert [field.name for field in dataclasses.fields(GraphcapOptions) if f"`{field.name}`" not in options] == []


def test_every_example_from_the_second_on_is_told() -> None:
    text = "".join(_read(page.name) for page in PAGES)
    for script in sorted((ROOT / "examples").glob("*.py"))[1:]:
        assert f"examples/{script.name}" in text

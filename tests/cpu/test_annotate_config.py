"""``annotation_config``: what is accepted, and what the errors name."""

from __future__ import annotations

from typing import Any

import pytest

from graphcap_backend.annotate.config import AnnotationConfig


def test_nothing_given_is_the_documented_default() -> None:
    config = AnnotationConfig.parse(None)
    assert config == AnnotationConfig.parse({})
    assert (config.backend, config.key_by, config.record_py_stacks) == ("auto", "exec", False)
    assert config.py_stack_filter_paths is None


def test_all_options() -> None:
    config = AnnotationConfig.parse(
        {"backend": "cupti", "key_by": "source", "record_py_stacks": True, "py_stack_filter_paths": ["a", "b"]}
    )
    assert config.backend == "cupti"
    assert config.key_by == "source"
    assert config.record_py_stacks
    assert config.py_stack_filter_paths == ("a", "b")


def test_an_empty_filter_list_is_not_the_default() -> None:
    assert AnnotationConfig.parse({"py_stack_filter_paths": []}).py_stack_filter_paths == ()


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"backnd": "auto"}, ["backnd", "backend", "key_by", "record_py_stacks", "py_stack_filter_paths"]),
        ({"best_effort": True}, ["best_effort"]),
        ({"backend": "nvtx"}, ["nvtx", "auto", "cupti", "edge_walk"]),
        ({"backend": None}, ["None", "auto"]),
        ({"backend": ["auto"]}, ["auto"]),
        ({"key_by": "capture"}, ["capture", "exec", "source", "auto"]),
        ({"backend": "edge_walk", "record_py_stacks": True}, ["edge_walk", "record_py_stacks"]),
        ({"py_stack_filter_paths": [""]}, ["py_stack_filter_paths"]),
    ],
)
def test_bad_values_name_the_valid_ones(config: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        AnnotationConfig.parse(config)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    "config",
    [
        "cupti",
        [("backend", "auto")],
        {"record_py_stacks": 1},
        {"py_stack_filter_paths": "a"},
        {"py_stack_filter_paths": [1]},
        {"py_stack_filter_paths": {"a"}},
    ],
)
def test_wrong_types(config: Any) -> None:
    with pytest.raises(TypeError):
        AnnotationConfig.parse(config)

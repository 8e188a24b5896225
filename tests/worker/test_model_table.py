"""A model family is a file, its row in `MODELS` and its row in `FAMILIES`: nothing else knows a family by its name."""

import ast
from pathlib import Path

from minisgl.families import FAMILIES, SUPPORTED_ARCHITECTURES, TEXT_PARTS
from minisgl_worker.models import MODELS

ROOT = Path(__file__).parents[2]
TABLES = {"minisgl/families.py", "minisgl_worker/models/__init__.py"}


def find_family_names(source: str) -> list[str]:
    """Strings, other than docstrings, with the name of an architecture or of a family as architectures begin with."""
    names = {name.split("For")[0] for name in SUPPORTED_ARCHITECTURES}
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [
        text
        for text in texts
        if isinstance(text, str) and (text in names or text.endswith(("ForCausalLM", "ForConditionalGeneration")))
    ]


def test_every_family_has_its_builder():
    assert sorted(FAMILIES) == sorted(MODELS)
    assert {family for part in TEXT_PARTS.values() for family in part.values()} <= FAMILIES.keys()


def test_no_other_file_names_a_family():
    files = [path for package in ("minisgl", "minisgl_worker") for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): find_family_names(path.read_text()) for path in files}
    assert all(found.pop(name) for name in TABLES)
    assert not {name: texts for name, texts in found.items() if texts}
    assert find_family_names('if architecture.startswith("Gemma3"): x = ("LlamaForCausalLM",)') == [
        "Gemma3",
        "LlamaForCausalLM",
    ]

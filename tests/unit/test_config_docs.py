"""`docs/config.md` and `EngineConfig` say the same."""

import json
from dataclasses import MISSING, fields
from pathlib import Path

from minisgl.config import ALIASES, EngineConfig

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
NUM_COLUMNS = 5


def read_rows(text: str) -> dict[str, list[str]]:
    """Option -> the other cells of its row (default, aliases, meaning, reason)."""
    rows = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == NUM_COLUMNS, line
            option = cells[0].strip("`")
            assert option not in rows, f"two rows for {option}"
            rows[option] = cells[1:]
    return rows


def write_default(value: object) -> str:
    if value is MISSING:
        return "required"
    return f"`{json.dumps(value)}`" if isinstance(value, str) else f"`{value!r}`"


def test_rows_name_every_field_and_no_other():
    assert list(read_rows(PAGE.read_text())) == [field.name for field in fields(EngineConfig)]


def test_rows_state_the_defaults():
    defaults = {field.name: write_default(field.default) for field in fields(EngineConfig)}
    assert {name: cells[0] for name, cells in read_rows(PAGE.read_text()).items()} == defaults


def test_rows_state_every_alias():
    stated = {}
    for name, cells in read_rows(PAGE.read_text()).items():
        stated |= {alias.strip("` "): name for alias in cells[1].split(",") if alias}
    assert stated.pop("model_path") == "model"  # the keyword of `LLM`
    assert stated == ALIASES


def test_rows_have_a_meaning_and_a_reason():
    assert [name for name, cells in read_rows(PAGE.read_text()).items() if not all(cells[2:])] == []

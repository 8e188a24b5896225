"""Which safetensors files make up a checkpoint, and what is refused from their headers, by name."""

import re
from pathlib import Path

import pytest
from model_folders import (
    list_tensors,
    write_folder,
    write_json,
    write_safetensors,
)

from minisgl.errors import ModelLoadError
from minisgl.model_folder import resolve_model


def write_index(folder: Path, weight_map: object) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def split(folder: Path, **parts: slice) -> dict[str, str]:
    """Cut the folder's file into files of these parts of its tensors; returns the map of an index."""
    tensors = list_tensors(folder)
    names = list(tensors)
    (folder / "model.safetensors").unlink()
    for stem, part in parts.items():
        write_safetensors(folder / f"{stem}.safetensors", {name: tensors[name] for name in names[part]})
    return {name: f"{stem}.safetensors" for stem, part in parts.items() for name in names[part]}


def test_weight_files_follow_the_index_and_tell_of_stray_ones(tmp_path):
    folder = write_folder(tmp_path)
    write_index(folder, split(folder, b=slice(0, None, 2), a=slice(1, None, 2)))
    write_safetensors(folder / "stray.safetensors")
    model = resolve_model(str(folder))
    assert [p.name for p in model.weight_files] == ["a.safetensors", "b.safetensors"]
    assert model.tensors.keys() == list_tensors(folder).keys()
    assert model.stray_files == ("stray.safetensors",)


def test_index_decides_between_two_files_that_hold_a_tensor(tmp_path):
    folder = write_folder(tmp_path)
    weight_map = split(folder, a=slice(0, 9), b=slice(8, None))
    with pytest.raises(ModelLoadError, match=r"both hold model\.layers\.0"):
        resolve_model(str(folder))
    write_index(folder, weight_map)
    shared = list(list_tensors(folder))[8]
    assert resolve_model(str(folder)).tensors[shared].file.name == "b.safetensors"


def test_index_that_names_a_tensor_of_no_file_is_refused(tmp_path):
    folder = write_folder(tmp_path)
    write_index(folder, {**split(folder, a=slice(None)), "model.gone": "a.safetensors"})
    with pytest.raises(ModelLoadError, match=r"index\.json lists 1 tensors .* model\.gone \(a\.safetensors\)"):
        resolve_model(str(folder))


def test_weight_files_without_an_index_are_the_one_or_all(tmp_path):
    folder = write_folder(tmp_path)
    write_safetensors(folder / "consolidated.safetensors")
    assert [p.name for p in resolve_model(str(folder)).weight_files] == ["model.safetensors"]
    (folder / "consolidated.safetensors").unlink()
    split(folder, b=slice(3), c=slice(3, None))
    assert [p.name for p in resolve_model(str(folder)).weight_files] == ["b.safetensors", "c.safetensors"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda t: [t.pop(name) for name in list(t) if ".0." in name],
            "lacks 9 tensors: model.layers.0.self_attn.q_proj",
        ),
        (lambda t: t.update({"model.more": (1,)}), "holds 1 tensors that the model has no place for: model.more"),
        (lambda t: t.update({"model.norm.weight": (5,)}), "model.norm.weight has the shape (5,), expected (64,)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, text):
    folder = write_folder(tmp_path)
    tensors = list_tensors(folder)
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelLoadError, match=re.escape(text)):
        resolve_model(str(folder))


def test_tensors_may_be_more_where_they_are_not_needed(tmp_path):
    folder = write_folder(tmp_path, tie_word_embeddings=True)
    extra = {"lm_head.weight": (320, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    write_safetensors(folder / "model.safetensors", {**list_tensors(folder), **extra})
    assert resolve_model(str(folder)).tensors.keys() == list_tensors(folder).keys()


def test_dtypes_that_are_not_supported_are_named(tmp_path):
    folder = write_folder(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(ModelLoadError, match=r"model\.embed_tokens\.weight \(I32\).*F64, F32, F16, BF16"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "weight_map, part",
    [
        ({"x": "gone.safetensors"}, "gone.safetensors"),
        ({"x": "../model.safetensors"}, "../model.safetensors"),
        ({"x": "/etc/passwd"}, "/etc/passwd"),
        ({"x": "model.bin"}, "model.bin"),
        ({"x": 5}, "5"),
        ({}, "weight_map"),
        ([1], "weight_map"),
    ],
)
def test_weight_files_of_a_bad_index_are_refused(tmp_path, weight_map, part):
    folder = write_folder(tmp_path)
    write_index(folder, weight_map)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(str(folder))
    assert part in str(caught.value) and "index.json" in str(caught.value)


def cut(data: bytes) -> bytes:
    return data[:-1]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        lambda data: (2**62).to_bytes(8, "little") + data[8:],
        lambda data: (3).to_bytes(8, "little") + b"[1]",
        lambda data: data.replace(b"[0, 81920]", b"[0, 81924]", 1),  # not the size of its shape
        lambda data: data.replace(b"[0, 81920]", b"[9, 81929]", 1),  # overlaps the next one
        lambda data: data.replace(b"[0, 81920]", b"[0,  -256]", 1),
        lambda data: (8).to_bytes(8, "little") + b'{"a": 5}',
    ],
)
def test_weight_files_that_are_not_whole_are_named(tmp_path, change):
    folder = write_folder(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        resolve_model(str(folder))


def test_no_weights_is_an_error_unless_none_are_needed(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no weights"):
        resolve_model(str(folder))
    assert resolve_model(str(folder), need_weights=False).weight_files == ()


def test_pickle_weights_are_refused_with_the_way_out(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin.*save_pretrained"):
        resolve_model(str(folder))

"""The families that a folder may name are those that the worker has."""

from minisgl.model_folder import SUPPORTED_ARCHITECTURES
from minisgl_worker.models import MODELS


def test_supported_architectures_are_the_workers():
    assert sorted(SUPPORTED_ARCHITECTURES) == sorted(MODELS)

"""Demo problems, shared by all tests of block diffusion."""
import pytest

from diffusion import make_problems


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """Folder of demo files: 60 training and 20 test problems of both systems, tokenizer.json."""
    folder = tmp_path_factory.mktemp("demo")
    make_problems.write_demo(folder, 60, 20)
    return folder

from pathlib import Path

import pytest

from megaverl.data.tiny import build_tiny_checkpoint
from megaverl.data.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoint) -> Tokenizer:
    return load_tokenizer(tiny_checkpoint)


@pytest.fixture(scope="session")
def shared_assets() -> Path:
    """Real data that lies beside the checkout on development machines."""
    folder = Path(__file__).parents[4] / "shared" / "assets"
    if not folder.is_dir():
        pytest.skip("needs ../shared/assets (GSM8K and the Qwen2.5 tokenizer)")
    return folder

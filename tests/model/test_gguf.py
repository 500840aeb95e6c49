""".gguf files become float32 weights once, whatever type they are in, and are then served like any other model."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from replica.config import ModelConfig
from replica.errors import ModelUnsupported
from replica.model.prepare import prepare
from tests.model.gguf_files import save_gguf
from tests.model.paged_logits import dense_logits, distance, load, paged_logits


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q2_K", "Q4_K", "Q6_K"])
def test_a_gguf_file_answers_as_the_weights_that_it_stands_for(kind: str, tmp_path: Path) -> None:
    meant = save_gguf(tmp_path / "tiny.gguf", kind)
    card = prepare(ModelConfig(str(tmp_path / "tiny.gguf")), cache_dir=tmp_path / "cache", progress=lambda _: None)
    runner = load(card, Path(card.weights_dir))
    assert distance(paged_logits(runner), dense_logits(meant)) < 2e-5
    runner.close()


def test_a_gguf_architecture_that_transformers_cannot_read_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "from-the-future")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match=r"transformers can't load .*odd\.gguf: ") as caught:
        prepare(ModelConfig(str(tmp_path / "odd.gguf")), cache_dir=tmp_path / "cache", progress=lambda _: None)
    assert "\n" not in caught.value.message

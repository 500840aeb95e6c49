"""Block hashes name content, history and tenant, alike in every process."""

from __future__ import annotations

import subprocess
import sys

from replica.scheduler.block_hash import block_hash, block_hashes, root_hash


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(block_hashes(range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_longer_prompt_continues_the_chain_of_a_shorter_one() -> None:
    assert block_hashes(range(12), 4)[:2] == block_hashes(range(8), 4)


def test_a_hash_names_everything_before_its_block() -> None:
    assert block_hashes([1, 2, 3, 4], 2)[1] != block_hashes([9, 2, 3, 4], 2)[1]


def test_the_chain_is_built_of_roots_and_blocks() -> None:
    first = block_hash(root_hash("tenant"), [1, 2])
    assert block_hashes([1, 2, 3, 4], 2, cache_salt="tenant") == (first, block_hash(first, [3, 4]))


def test_extras_are_tagged_so_that_no_two_sets_collide() -> None:
    roots = [root_hash(), root_hash(""), root_hash("a"), root_hash(None, "a"), root_hash("a", "a"), root_hash("aa")]
    assert len(set(roots)) == len(roots)


def test_a_salt_that_is_no_unicode_text_has_a_hash_too() -> None:
    assert len(root_hash("\ud800")) == 32


def test_another_process_with_another_hash_seed_gets_the_same_chain() -> None:
    code = "from replica.scheduler.block_hash import block_hashes; print(block_hashes([5, 6, 7, 8], 2, 's')[1].hex())"
    out = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True)
    assert out.stdout.strip() == block_hashes([5, 6, 7, 8], 2, "s")[1].hex(), out.stderr

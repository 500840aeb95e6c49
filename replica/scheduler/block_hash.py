"""The name of a full block's content: a hash chain that every process computes alike.

    root = H(tagged extras)        block i = H(block i-1 | token ids of block i)

A block's hash therefore names its tokens, everything before them and who may share them. The router computes the same
chain from the prompt to find the replica that holds its prefix. Strong (BLAKE2b, 256 bits), because a collision would
show one tenant another's context; free of Python's per-process `hash`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_SIZE = 32
_DOMAIN = b"brimful-kv-1"


def root_hash(cache_salt: str | None = None, adapter: str | None = None) -> bytes:
    """The chain's start. Extras are tagged and length-prefixed, so that no two sets of them write the same bytes."""
    digest = blake2b(_DOMAIN, digest_size=_DIGEST_SIZE)
    for tag, value in ((b"adapter", adapter), (b"cache_salt", cache_salt)):
        if value is not None:
            encoded = value.encode("utf-8", "surrogatepass")
            digest.update(tag + struct.pack("<Q", len(encoded)) + encoded)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one full block after `parent`. Token ids are non-negative and below 2^32."""
    return blake2b(parent + struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=_DIGEST_SIZE).digest()


def block_hashes(
    token_ids: Sequence[int], block_size: int, cache_salt: str | None = None, adapter: str | None = None
) -> tuple[bytes, ...]:
    """The chain of all full blocks of `token_ids`, first block first; a last block that isn't full has no hash."""
    parent = root_hash(cache_salt, adapter)
    chain = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        chain.append(parent)
    return tuple(chain)

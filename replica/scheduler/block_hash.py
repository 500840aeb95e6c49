"""The name of a full block's content: a hash chain that every process computes alike.

    root = H(tagged extras)        block i = H(block i-1 | token ids of block i)

A block's hash therefore names its tokens, everything before them and who may share them. The router computes the same
chain from the prompt to find the replica that holds its prefix. Strong (BLAKE2b, 256 bits), because a collision would
show one tenant another's context; free of Python's per-process `hash`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

TOKEN_BYTES = 4

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


def packed(token_ids: Iterable[int]) -> bytes:
    """Token ids as 4 bytes each, little-endian. They are non-negative and below 2^32."""
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def block_hash(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """The hash of one full block after `parent`."""
    return blake2b(parent + packed(token_ids), digest_size=_DIGEST_SIZE).digest()


def extend_chain(chain: list[bytes], root: bytes, block_ids: bytes, block_size: int) -> None:
    """Append the hashes of these blocks, packed, to a chain that starts after `root`."""
    parent = chain[-1] if chain else root
    width = TOKEN_BYTES * block_size
    for start in range(0, len(block_ids) - width + 1, width):
        parent = blake2b(parent + block_ids[start : start + width], digest_size=_DIGEST_SIZE).digest()
        chain.append(parent)


def block_hashes(
    token_ids: Sequence[int], block_size: int, cache_salt: str | None = None, adapter: str | None = None
) -> tuple[bytes, ...]:
    """The chain of all full blocks of `token_ids`, first block first; a last block that isn't full has no hash."""
    chain: list[bytes] = []
    extend_chain(chain, root_hash(cache_salt, adapter), packed(token_ids), block_size)
    return tuple(chain)

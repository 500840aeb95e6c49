from dataclasses import asdict

from router.serve_router import report_of
from tests.unit.router.loads import report


def test_a_report_crosses_as_a_plain_dict() -> None:
    made = report("a", number=7, block_hashes_added=(b"x",))
    assert report_of(asdict(made)) == made
    assert report_of({**asdict(made), "from_a_newer_version": 1}) == made


def test_what_is_no_report_is_none() -> None:
    assert report_of({}) is None
    assert report_of({"number": 7}) is None

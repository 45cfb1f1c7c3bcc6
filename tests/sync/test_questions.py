from __future__ import annotations

from meshgate_sync.questions import Questions

ONE, OTHER = b"1" * 32, b"2" * 32
PIECES = {b"%d" % number: 10 for number in range(8)}


def test_a_version_is_asked_for_in_turns_when_half_of_the_last_has_come() -> None:
    questions = Questions(40)
    questions.add(ONE, PIECES)
    assert questions.due() == [(ONE, (b"0", b"1", b"2", b"3"))]
    questions.came(b"2")
    assert questions.due() == []
    questions.came(b"0")
    assert questions.due() == [(ONE, (b"4", b"5"))]
    for digest in PIECES:
        questions.came(digest)
    assert questions.due() == []


def test_what_has_come_for_one_version_is_not_asked_for_another() -> None:
    questions = Questions(20)
    questions.add(ONE, PIECES)
    questions.add(OTHER, {b"7": 10, b"6": 10, b"new": 10})
    questions.came(b"6")
    assert questions.due() == [(ONE, (b"0", b"1")), (OTHER, (b"7", b"new"))]


def test_a_version_whose_pieces_never_come_holds_up_no_other() -> None:
    questions = Questions(20)
    questions.add(ONE, PIECES)
    assert questions.due()
    questions.add(OTHER, {b"other": 10})
    assert questions.due() == [(OTHER, (b"other",))]
    questions.forget(ONE)
    for digest in PIECES:
        questions.came(digest)
    assert questions.due() == []

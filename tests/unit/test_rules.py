"""Every transport rule stands at an RTL line and has a test that runs hardware, or is listed here with the reason."""

import pytest
from tools import rules

from tests.rules import TITLES, check_ids

#: Reason to the rules that no RTL line implements yet. A rule leaves the list with its first RTL line.
NOT_IN_RTL = {
    "loss recovery is not built": "R-RTY-1 R-RTY-2 R-RTY-3 R-RTY-4 R-TMO-1 R-TMO-2 R-TMO-3 R-RTC-1 R-RTC-2 R-RNR-1 R-RNR-2",
    "nothing in the datapath refuses a packet: credits are taken before it begins": "R-REQ-6",
    "UC is not built": "R-UC-1 R-UC-2 R-UC-3 R-UC-4 R-ERR-6",
    "UD is not built": "R-UD-2 R-UD-3 R-UD-4 R-UD-5 R-UD-6 R-QKEY-2",
    "SRQs are not built": "R-SRQ-1 R-SRQ-2 R-SRQ-3 R-SRQ-4 R-SRQ-5",
    "memory windows and local operations are not built": "R-REQ-5 R-ORD-3",
    "congestion control is not built": "R-CC-2 R-CC-4 R-CC-5",
    "CQs are not resized": "R-CQ-7",
    "software's part": "R-ADR-2 R-QKEY-3 R-WQ-1 R-WQ-2 R-WQ-9",
}


@pytest.fixture(scope="module")
def coverage():
    return rules.coverage()


def test_the_table_has_every_rule(coverage):
    """No RTL line and no test names a rule that is none."""
    assert list(coverage) == list(TITLES)


def test_every_rule_has_a_line_and_a_test(coverage):
    elsewhere = {rule for ids in NOT_IN_RTL.values() for rule in ids.split()}
    assert elsewhere <= set(TITLES)
    without_line = {rule for rule, known in coverage.items() if not known.places} - elsewhere
    without_test = {rule for rule, known in coverage.items() if not known.tests} - elsewhere
    assert not without_line and not without_test
    built = {rule for rule in elsewhere if any(rules.implements(place) for place in coverage[rule].places)}
    assert not built, "no longer a rule without RTL"


def test_ids_of_a_comment():
    assert list(rules.ids_in("R-ICRC-1..3, checks 2 and 4, R-DUP-3 to R-DUP-4; 8.2, 8.1#10")) == [
        "R-ICRC-1", "R-ICRC-2", "R-ICRC-3", "R-DUP-3", "R-DUP-4", "8.1#2", "8.1#4", "8.2", "8.1#10"]  # fmt: skip
    assert not list(rules.ids_in("takes 18.2 ns, or R-one"))


def test_unknown_ids_are_refused():
    with pytest.raises(ValueError, match="no such rule: R-DUP-99"):
        check_ids(("R-DUP-1", "R-DUP-99"))
    for ids in ((), ("R-DUP-1", "R-DUP-1")):
        with pytest.raises(ValueError, match="once"):
            check_ids(ids)

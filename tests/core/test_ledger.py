"""The account, with numbers worked by hand."""

import json

import pytest

from fedbcgd.core.ledger import Ledger, LedgerEntry


def entry(client, nbytes, block=0, accepted=True, download=100, evaluations=1):
    return LedgerEntry(0, client, block, nbytes // 4, nbytes, download, accepted, evaluations)


def test_by_hand():
    """d = 10 floats of 4 bytes. Round 1: clients send 8 and 16 bytes: mean 12 of 40 = 0.3 d. Round 2: one sends 20, is
    refused, and sends 20 again: one client with 40 bytes = 1 d. A lost one costs its download alone."""
    ledger = Ledger(dim=10, itemsize=4, blocks=2)
    ledger.open_round()
    ledger.record(entry(3, 8, block=0, evaluations=5))
    ledger.record(entry(7, 16, block=1, evaluations=2))
    ledger.close_round()
    assert ledger.upload_d == pytest.approx(0.3)
    assert ledger.upload_max_bytes == 16
    ledger.open_round()
    ledger.record(entry(3, 20, accepted=False))
    ledger.record(entry(3, 20, download=0, evaluations=0))
    ledger.record_lost(100)
    ledger.close_round()
    assert ledger.upload_d == pytest.approx(1.3)
    assert ledger.upload_bytes == 64
    assert ledger.upload_floats == 16
    assert ledger.upload_max_bytes == 40
    assert ledger.upload_wait_bytes == 16 + 40
    assert ledger.download_bytes == 400
    assert ledger.gradient_evaluations == 8
    assert (ledger.refused, ledger.lost) == (1, 1)
    assert ledger.block_bytes == [48, 16]


def test_a_round_without_uploads_costs_nothing():
    ledger = Ledger(10, 4, 1)
    ledger.open_round()
    ledger.close_round()
    assert ledger.upload_d == 0


def test_totals_survive_json():
    ledger = Ledger(10, 4, 1)
    ledger.open_round()
    ledger.record(entry(0, 40))
    ledger.close_round()
    again = Ledger.from_totals(json.loads(json.dumps(ledger.totals())))
    assert again.totals() == ledger.totals()

"""Receipts: prices contain the tax already; a returned line counts as negative."""

from decimal import ROUND_HALF_UP, Decimal


def _amount(count, price, percent_off):
    value = Decimal(str(price)) * Decimal(str(count))
    value -= value * Decimal(str(percent_off)) / Decimal(100)
    return value.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)


def receipt(rows):
    """Return the text of a receipt; `rows` has (name, count, price, percent off, is returned)."""
    total = Decimal("0.00")
    lines = []
    for name, count, price, percent_off, is_returned in rows:
        amount = _amount(count, price, percent_off)
        if is_returned:
            amount = -amount
        total += amount
        lines.append(f"{name:<12}{amount:>10}")
    lines.append(f"{'total':<12}{total:>10}")
    return "\n".join(lines)

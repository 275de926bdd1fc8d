#!/bin/bash
cd /app/billing || exit 1
cat > pricing.py <<'PYTHON'
"""The amount of a line, which all documents share."""

from decimal import ROUND_HALF_UP, Decimal


def line_amount(quantity, unit_price, discount):
    """Return the amount of one line, with a discount in percent."""
    gross = Decimal(str(unit_price)) * Decimal(str(quantity))
    net = gross - gross * Decimal(str(discount)) / Decimal(100)
    return net.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)
PYTHON
cat > invoice.py <<'PYTHON'
"""Invoices: lines with a discount in percent, and tax."""

from decimal import ROUND_HALF_UP, Decimal

from billing.pricing import line_amount


def invoice_total(lines, tax_percent):
    """Return net, tax and total as texts; `lines` has (quantity, unit price, discount)."""
    net = sum((line_amount(*line) for line in lines), Decimal("0.00"))
    tax = net * Decimal(str(tax_percent)) / Decimal(100)
    tax = tax.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)
    return {"net": str(net), "tax": str(tax), "total": str(net + tax)}
PYTHON
cat > quote.py <<'PYTHON'
"""Quotes: like invoices, without tax, and with a discount as a fraction."""

from decimal import Decimal

from billing.pricing import line_amount


def _amount(item):
    rebate = Decimal(str(item.get("rebate", 0))) * Decimal(100)
    return line_amount(item["quantity"], item["price"], rebate)


def quote_total(items):
    """Return the total as a text; `items` has objects with quantity, price and rebate."""
    return str(sum(map(_amount, items), Decimal("0.00")))


def describe(items):
    """Return one line of text per item, and the total."""
    lines = [f"{item['quantity']} x {item['name']}: {_amount(item)}" for item in items]
    return [*lines, f"total: {quote_total(items)}"]
PYTHON
cat > receipt.py <<'PYTHON'
"""Receipts: prices contain the tax already; a returned line counts as negative."""

from decimal import Decimal

from billing.pricing import line_amount


def receipt(rows):
    """Return the text of a receipt; `rows` has (name, count, price, percent off, is returned)."""
    total = Decimal("0.00")
    lines = []
    for name, count, price, percent_off, is_returned in rows:
        amount = line_amount(count, price, percent_off)
        if is_returned:
            amount = -amount
        total += amount
        lines.append(f"{name:<12}{amount:>10}")
    lines.append(f"{'total':<12}{total:>10}")
    return "\n".join(lines)
PYTHON

"""Invoices: lines with a discount in percent, and tax."""

from decimal import ROUND_HALF_UP, Decimal


def line_amount(quantity, unit_price, discount):
    """Return the amount of one line without tax."""
    gross = Decimal(str(unit_price)) * Decimal(str(quantity))
    net = gross - gross * Decimal(str(discount)) / Decimal(100)
    return net.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)


def invoice_total(lines, tax_percent):
    """Return net, tax and total as texts; `lines` has (quantity, unit price, discount)."""
    net = sum((line_amount(*line) for line in lines), Decimal("0.00"))
    tax = net * Decimal(str(tax_percent)) / Decimal(100)
    tax = tax.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)
    return {"net": str(net), "tax": str(tax), "total": str(net + tax)}

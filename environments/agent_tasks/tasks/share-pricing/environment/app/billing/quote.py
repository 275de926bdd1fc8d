"""Quotes: like invoices, without tax, and with a discount as a fraction."""

from decimal import ROUND_HALF_UP, Decimal


def quote_total(items):
    """Return the total as a text; `items` has objects with quantity, price and rebate."""
    total = Decimal("0.00")
    for item in items:
        price = Decimal(str(item["price"])) * Decimal(str(item["quantity"]))
        rebate = Decimal(str(item.get("rebate", 0))) * Decimal(100)
        price = price - price * rebate / Decimal(100)
        total += price.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)
    return str(total)


def describe(items):
    """Return one line of text per item, and the total."""
    lines = []
    for item in items:
        price = Decimal(str(item["price"])) * Decimal(str(item["quantity"]))
        rebate = Decimal(str(item.get("rebate", 0))) * Decimal(100)
        price = price - price * rebate / Decimal(100)
        price = price.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)
        lines.append(f"{item['quantity']} x {item['name']}: {price}")
    lines.append(f"total: {quote_total(items)}")
    return lines

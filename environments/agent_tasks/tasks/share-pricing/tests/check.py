"""Call the package /app/billing with other values, as it is and with another pricing module."""

import ast
import json
import stat
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from isolated import run_program

PACKAGE = Path("/app/billing")
MODULES = ("invoice", "quote", "receipt")
MAX_BYTES = 100_000
PROGRAM = """
import importlib
result = []
for module, function, arguments in data:
    try:
        value = getattr(importlib.import_module("billing." + module), function)(*arguments)
        result.append([type(value).__name__, value if type(value) in (dict, list) else str(value)])
    except Exception as error:
        result.append(["error", type(error).__name__])
"""
MARKED = """
from decimal import Decimal

def line_amount(quantity, unit_price, discount):
    percent = Decimal(str(discount)).normalize()
    return Decimal("1000.00") * int(quantity) + Decimal(str(unit_price)) + percent / 1000
"""
LINES = [
    [(3, "19.99", 0), (1, 0.125, 0), (2, "7.335", 10)],
    [(1, "0.005", 0), (7, 1.15, 33), (0, 99, 5)],
    [(250, "0.0199", 12.5)],
    [],
]


def amount(quantity, unit_price, discount):
    gross = Decimal(str(unit_price)) * Decimal(str(quantity))
    net = gross - gross * Decimal(str(discount)) / 100
    return net.quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)


def marked(quantity, unit_price, discount):
    percent = Decimal(str(discount)).normalize()
    return Decimal("1000.00") * int(quantity) + Decimal(str(unit_price)) + percent / 1000


def items_of(lines):
    return [
        {"name": f"thing {n}", "quantity": quantity, "price": price}
        | ({"rebate": str(Decimal(str(discount)) / 100)} if discount else {})
        for n, (quantity, price, discount) in enumerate(lines)
    ]


def rows_of(lines):
    return [(f"thing {n}", *line, n % 2 == 1) for n, line in enumerate(lines)]


def invoice_results(price_of, lines, tax_percent):
    net = sum((price_of(*line) for line in lines), Decimal("0.00"))
    tax = (net * Decimal(str(tax_percent)) / 100).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return ["dict", {"net": str(net), "tax": str(tax), "total": str(net + tax)}]


def quote_texts(price_of, lines):
    prices = [price_of(*line) for line in lines]
    total = str(sum(prices, Decimal("0.00")))
    texts = [
        f"{item['quantity']} x {item['name']}: {price}"
        for item, price in zip(items_of(lines), prices, strict=True)
    ]
    return ["str", total], ["list", [*texts, f"total: {total}"]]


def receipt_text(price_of, lines):
    total, texts = Decimal("0.00"), []
    for name, *line, is_returned in rows_of(lines):
        price = -price_of(*line) if is_returned else price_of(*line)
        total += price
        texts.append(f"{name:<12}{price:>10}")
    return ["str", "\n".join([*texts, f"{'total':<12}{total:>10}"])]


def calls(price_of):
    """Return calls and their results, by module."""
    found = {module: [] for module in MODULES}
    for lines in LINES:
        for tax in (19, "7.7"):
            call = ["invoice", "invoice_total", [lines, tax]]
            found["invoice"].append((call, invoice_results(price_of, lines, tax)))
        total, texts = quote_texts(price_of, lines)
        found["quote"].append((["quote", "quote_total", [items_of(lines)]], total))
        found["quote"].append((["quote", "describe", [items_of(lines)]], texts))
        found["receipt"].append((["receipt", "receipt", [rows_of(lines)]],
                                 receipt_text(price_of, lines)))  # fmt: skip
    return found


def line_calls(module):
    return [
        ([module, "line_amount", list(line)], ["Decimal", str(amount(*line))])
        for lines in LINES
        for line in lines
    ]


def are_right(sources, pairs):
    result = run_program(PROGRAM, sources, [call for call, _ in pairs])
    return result == [expected for _, expected in pairs]


def names_quantize(source):
    """Whether code other than that of the tax names `quantize`."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return True
    kept = [n for n in tree.body if getattr(n, "name", "") != "invoice_total"]
    return any("quantize" in ast.dump(node) for node in kept)


def read_sources():
    sources = {}
    for path in sorted(PACKAGE.glob("*.py"))[:20]:
        if stat.S_ISREG(path.lstat().st_mode) and path.stat().st_size <= MAX_BYTES:
            name = "billing" if path.stem == "__init__" else f"billing.{path.stem}"
            sources[name] = path.read_text("utf-8")
    return sources


def score(sources):
    original, replaced = calls(amount), calls(marked)
    before = [pair for module in MODULES for pair in original[module]] + line_calls("invoice")
    parts = dict.fromkeys(("pricing", *MODULES), 0.0)
    if "billing.pricing" not in sources or not are_right(sources, before):
        return parts
    parts["pricing"] = float(are_right(sources, line_calls("pricing")))
    for module in MODULES:
        uses_pricing = are_right(sources | {"billing.pricing": MARKED}, replaced[module])
        is_clean = not names_quantize(sources[f"billing.{module}"])
        parts[module] = float(uses_pricing and is_clean)
    return parts


try:
    parts = score(read_sources())
except (OSError, ValueError, KeyError) as error:
    print(f"{PACKAGE} cannot be read: {error!r}")
    parts = {"pricing": 0.0}
print(parts)
reward = sum(parts.values()) / 4
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, **parts}))

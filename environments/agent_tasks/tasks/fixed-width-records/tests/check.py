"""Run /app/convert.py on inputs that the agent has not seen."""

import json
import stat
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from isolated import run_script

PROGRAM = Path("/app/convert.py")
MAX_BYTES = 100_000


def line(account, name, cents, date="", currency="", *, is_cut=True):
    number = f"{abs(cents)}-" if cents < 0 else str(cents)
    text = f"{account:<6}{name:<20}{number:>11}{date:<8}{currency:<3}"
    return text.rstrip() if is_cut else text


def record(account, name, cents, date=None, currency="EUR"):
    return {
        "account": account, "name": name, "cents": cents, "date": date, "currency": currency,
    }  # fmt: skip


CASES = {
    "two records": (
        line("000001", "Ada Byron", 4200, "19991231") + "\n"
        + line("999999", "Store 7", 1, "20000101", "CHF") + "\n",
        [record("000001", "Ada Byron", 4200, "1999-12-31"),
         record("999999", "Store 7", 1, "2000-01-01", "CHF")],
    ),
    "negative": (
        line("000300", "Refund", -1, "20240229") + "\n" + line("000301", "Fee", -9999999999),
        [record("000300", "Refund", -1, "2024-02-29"), record("000301", "Fee", -9999999999)],
    ),
    "cut after the amount": (
        line("000010", "Nils", 500) + "\n", [record("000010", "Nils", 500)],
    ),
    "currency without date": (
        line("000011", "Nora", 0, "", "SEK") + "\n", [record("000011", "Nora", 0, None, "SEK")],
    ),
    "characters of several bytes": (
        line("004711", "Jörg Müßiggång", 12345, "20230515", "DKK") + "\n"
        + line("004712", "Łódź №5", -678, "20230516", "PLN") + "\n",
        [record("004711", "Jörg Müßiggång", 12345, "2023-05-15", "DKK"),
         record("004712", "Łódź №5", -678, "2023-05-16", "PLN")],
    ),
    "comments and blank lines": (
        "* 000417 is closed\n\n   \n" + line("000001", "A * B", 2, "20240101") + "\n*\n",
        [record("000001", "A * B", 2, "2024-01-01")],
    ),
    "CR LF": (
        line("000020", "Otto", 20, "20221105", "USD") + "\r\n\r\n"
        + line("000021", "Inga", 21, "20221106") + "\r\n",
        [record("000020", "Otto", 20, "2022-11-05", "USD"),
         record("000021", "Inga", 21, "2022-11-06")],
    ),
    "full width": (
        line("123456", "Twenty characters ab", 12345678901, "20240630", "EUR", is_cut=False) + "\n"
        + line("654321", "x", 3, is_cut=False) + "\n",
        [record("123456", "Twenty characters ab", 12345678901, "2024-06-30"),
         record("654321", "x", 3)],
    ),
    "nothing": ("* only a comment\n", []),
    "digits and spaces in names": (
        line("000777", "2024 Quay 12  B", 98765, "20240401") + "\n",
        [record("000777", "2024 Quay 12  B", 98765, "2024-04-01")],
    ),
}  # fmt: skip


def is_right(source, stdin, expected):
    printed = run_script(source, stdin)
    try:
        found = json.loads(printed or "")
    except (ValueError, RecursionError):
        return False
    # As text, so that 5 and 5.0 or true and 1 are different.
    return json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)


def read_program():
    try:
        if stat.S_ISREG(PROGRAM.lstat().st_mode) and PROGRAM.stat().st_size <= MAX_BYTES:
            return PROGRAM.read_text("utf-8")
    except (OSError, ValueError) as error:
        print(f"{PROGRAM} cannot be read: {error}")
    return None


program = read_program()
passed = [name for name, case in CASES.items() if program is not None and is_right(program, *case)]
if passed == ["nothing"]:
    passed = []  # a program that always prints an empty list
print(f"passed: {', '.join(passed) or 'no case'}")
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": len(passed) / len(CASES)}))

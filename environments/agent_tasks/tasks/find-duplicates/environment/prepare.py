"""Make a folder with copies: equal files, files of equal size, and files of equal name."""

import random
from pathlib import Path

LINES = [f"entry {n:03} of the ledger, amount {n * 37 % 101}" for n in range(40)]
chance = random.Random(11)
root = Path("/app/inbox")
folders = ["", "2023", "2023/scans", "2024", "2024/mail", "backup", "backup/old mail"]
texts = ["\n".join(chance.sample(LINES, 6)) + "\n" for _ in range(16)]
texts.append(texts[0][:-1])  # differs in its last line break
texts.append(texts[1].replace("ledger", "Ledger", 1))  # has the size of another one
for number in range(44):
    text = texts[number] if number < len(texts) else texts[chance.randrange(9)]
    folder = root / chance.choice(folders)
    folder.mkdir(parents=True, exist_ok=True)
    name = chance.choice(["report", "letter", "list", "Scan"])
    (folder / f"{name}-{number % 7}.txt").write_text(text)
for name in ("2023/empty.txt", "backup/empty.txt"):
    (root / name).write_text("")
(root / "2024/mail/.hidden.txt").write_text(texts[3])

#!/bin/bash
cp /app/stock.db /app/repaired.db
python3 - <<'PYTHON'
import sqlite3

database = sqlite3.connect("/app/repaired.db")
database.executescript("""
DELETE FROM movements WHERE product_id IS NULL OR product_id NOT IN (SELECT id FROM products);
DELETE FROM movements WHERE id NOT IN (
    SELECT min(id) FROM movements GROUP BY product_id, change, at, note
);
UPDATE products SET name = trim(name, ' ' || char(9) || char(10) || char(13));
UPDATE products SET quantity = coalesce(
    (SELECT sum(change) FROM movements WHERE product_id = products.id), 0
);
""")
PYTHON

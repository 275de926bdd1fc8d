"""Make /app/people.db in its earlier schema."""

import sqlite3

ROWS = [
    (1, "Olsen, Maria", "555-0101; 555-0102", "oslo"),
    (2, "Weber, Karl", "555-0103", "Bonn"),
    (3, "Diaz", None, None),
    (5, "Ito, Yu", " 555-0104 ;555-0101;", "Oslo"),
    (8, "Roy, Ann", "", "BONN"),
]

database = sqlite3.connect("/app/people.db")
database.execute("CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT, phones TEXT, city TEXT)")
database.executemany("INSERT INTO people VALUES (?, ?, ?, ?)", ROWS)
database.commit()

#!/bin/bash
cat > /app/migrate.sql <<'SQL'
CREATE TABLE cities (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE persons (
    id INTEGER PRIMARY KEY, first_name TEXT, last_name TEXT NOT NULL,
    city_id INTEGER REFERENCES cities
);
CREATE TABLE phones (
    person_id INTEGER NOT NULL REFERENCES persons, position INTEGER NOT NULL, number TEXT NOT NULL,
    PRIMARY KEY (person_id, position)
);

INSERT INTO cities (id, name)
SELECT row_number() OVER (ORDER BY name), name
FROM (SELECT DISTINCT lower(city) AS name FROM people WHERE city IS NOT NULL);

INSERT INTO persons (id, first_name, last_name, city_id)
SELECT
    people.id,
    CASE WHEN instr(people.name, ',') THEN
        trim(substr(people.name, instr(people.name, ',') + 1)) END,
    trim(CASE WHEN instr(people.name, ',') THEN
        substr(people.name, 1, instr(people.name, ',') - 1) ELSE people.name END),
    cities.id
FROM people LEFT JOIN cities ON cities.name = lower(people.city);

WITH RECURSIVE parts (person_id, step, part, rest) AS (
    SELECT id, 0, '', phones || ';' FROM people WHERE phones IS NOT NULL
    UNION ALL
    SELECT person_id, step + 1, trim(substr(rest, 1, instr(rest, ';') - 1)),
        substr(rest, instr(rest, ';') + 1)
    FROM parts WHERE rest <> ''
)
INSERT INTO phones (person_id, position, number)
SELECT person_id, row_number() OVER (PARTITION BY person_id ORDER BY step), part
FROM parts WHERE part <> '';

DROP TABLE people;
SQL

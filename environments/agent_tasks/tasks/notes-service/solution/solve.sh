#!/bin/bash
cat > /app/service.py <<'PYTHON'
"""Notes over HTTP, as a WSGI application: `python3 service.py` serves it on port 8000."""

import json
from urllib.parse import parse_qs

PAGE_SIZE = 3
REASONS = {
    200: "OK",
    201: "Created",
    204: "No Content",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
}


class Problem(Exception):
    """A response that is not a success."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status
        self.text = text


class Notes:
    """An application with its notes in memory."""

    def __init__(self):
        self.notes = {}
        self.last_id = 0

    def __call__(self, environ, start_response):
        try:
            status, value = self.respond(environ)
        except Problem as problem:
            status, value = problem.status, {"error": problem.text}
        if status == 204:
            start_response(f"{status} {REASONS[status]}", [])
            return []
        content = json.dumps(value, ensure_ascii=False).encode("utf-8")
        headers = [
            ("Content-Type", "application/json; charset=utf-8"),
            ("Content-Length", str(len(content))),
        ]
        start_response(f"{status} {REASONS[status]}", headers)
        return [content]

    def respond(self, environ):
        method = environ["REQUEST_METHOD"]
        path = environ.get("PATH_INFO", "/")
        if path == "/notes":
            if method == "POST":
                return 201, self.add(self.body(environ))
            if method == "GET":
                return 200, self.list(parse_qs(environ.get("QUERY_STRING", "")))
            raise Problem(405, "not allowed")
        if path.startswith("/notes/"):
            if method not in ("GET", "DELETE"):
                raise Problem(405, "not allowed")
            number = self.number(path.removeprefix("/notes/"))
            if number not in self.notes:
                raise Problem(404, "not found")
            if method == "DELETE":
                del self.notes[number]
                return 204, None
            return 200, self.notes[number]
        raise Problem(404, "not found")

    def number(self, text):
        return int(text) if text.isascii() and text.isdigit() else None

    def body(self, environ):
        length = int(environ.get("CONTENT_LENGTH") or 0)
        try:
            return json.loads(environ["wsgi.input"].read(length))
        except ValueError:
            raise Problem(400, "bad request") from None

    def add(self, values):
        title = values.get("title") if isinstance(values, dict) else None
        if not isinstance(title, str) or not title.strip():
            raise Problem(400, "bad request")
        tags = values.get("tags", [])
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise Problem(400, "bad request")
        self.last_id += 1
        self.notes[self.last_id] = {"id": self.last_id, "title": title, "tags": tags}
        return self.notes[self.last_id]

    def list(self, query):
        page = self.number(query.get("page", ["1"])[0])
        if not page:
            raise Problem(400, "bad request")
        tag = query.get("tag", [None])[0]
        notes = [note for note in self.notes.values() if tag is None or tag in note["tags"]]
        start = (page - 1) * PAGE_SIZE
        return {"notes": notes[start : start + PAGE_SIZE], "total": len(notes)}


app = Notes()

if __name__ == "__main__":
    from wsgiref.simple_server import make_server

    make_server("127.0.0.1", 8000, app).serve_forever()
PYTHON

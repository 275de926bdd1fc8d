"""Notes over HTTP, as a WSGI application: `python3 service.py` serves it on port 8000."""

import json
from urllib.parse import parse_qs

PAGE_SIZE = 3
REASONS = {200: "OK", 201: "Created", 204: "No Content", 400: "Bad Request", 404: "Not Found"}


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

    def __call__(self, environ, start_response):
        try:
            status, value = self.respond(environ)
        except Problem as problem:
            status, value = problem.status, {"error": problem.text}
        text = json.dumps(value, ensure_ascii=False)
        headers = [
            ("Content-Type", "application/json; charset=utf-8"),
            ("Content-Length", str(len(text))),
        ]
        start_response(f"{status} {REASONS[status]}", headers)
        return [text.encode("utf-8")]

    def respond(self, environ):
        method = environ["REQUEST_METHOD"]
        path = environ.get("PATH_INFO", "/")
        if path == "/notes":
            if method == "POST":
                return 201, self.add(self.body(environ))
            return 200, self.list(parse_qs(environ.get("QUERY_STRING", "")))
        if path.startswith("/notes/"):
            number = int(path.removeprefix("/notes/"))
            if method == "DELETE":
                del self.notes[number]
                return 204, None
            return 200, self.notes[number]
        raise Problem(404, "not found")

    def body(self, environ):
        length = int(environ.get("CONTENT_LENGTH") or 0)
        return json.loads(environ["wsgi.input"].read(length))

    def add(self, values):
        title = values["title"]
        if not title:
            raise Problem(400, "bad request")
        number = len(self.notes) + 1
        self.notes[number] = {"id": number, "title": title, "tags": values.get("tags", [])}
        return self.notes[number]

    def list(self, query):
        page = int(query.get("page", ["1"])[0])
        tag = query.get("tag", [None])[0]
        start = page * PAGE_SIZE
        notes = list(self.notes.values())[start : start + PAGE_SIZE]
        if tag is not None:
            notes = [note for note in notes if tag in note["tags"]]
        return {"notes": notes, "total": len(notes)}


app = Notes()

if __name__ == "__main__":
    from wsgiref.simple_server import make_server

    make_server("127.0.0.1", 8000, app).serve_forever()

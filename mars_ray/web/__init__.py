"""Pages for people: those an endpoint shows, and reports, with one look and one way to draw charts."""

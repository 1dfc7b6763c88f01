"""The replica's side of the controller: reports out, directives in."""

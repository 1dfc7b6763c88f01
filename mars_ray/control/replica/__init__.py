"""The replica's side of control: it sends reports and follows directives."""

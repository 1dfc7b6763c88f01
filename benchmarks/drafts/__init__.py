"""Drafts from text against one token at a time, on tasks whose answers repeat much or little of what is there."""

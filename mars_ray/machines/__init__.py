"""Machines by their data sheets: the time of a step that they would take."""

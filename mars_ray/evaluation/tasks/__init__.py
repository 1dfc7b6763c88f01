"""What is asked: tasks with what judges their answers."""

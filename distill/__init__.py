"""Prompt distillation: teacher labels, chats, student, evaluation."""

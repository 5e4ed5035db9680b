"""Ops that only communicate."""

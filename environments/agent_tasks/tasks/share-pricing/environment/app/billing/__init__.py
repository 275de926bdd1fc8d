"""Invoices, quotes and receipts."""

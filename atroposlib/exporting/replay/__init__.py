"""Groups of an earlier run used again: scored anew, posted to a service, compared."""

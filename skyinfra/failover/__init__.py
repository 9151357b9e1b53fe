"""Failover: a deploy that a cloud refuses for want of capacity or quota goes on with the next place of its pool."""

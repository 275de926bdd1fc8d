#!/bin/bash
echo delta >> /app/names.txt

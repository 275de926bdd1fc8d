#!/bin/bash
cp /app/draft.txt /app/final.txt

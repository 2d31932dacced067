"""Checkpoints: conversion, merging, verification, atomic writing."""

"""Make the photos: small files, each with its own content."""

from pathlib import Path

NAMES = """
IMG_20230704_0915_Harbour.JPG
IMG_20230704_0915_harbour.jpg
IMG_20230704_1802_Old Town Gate.jpg
IMG_20231231_2359_Fireworks.JPG
IMG_20240102_0000_Snow.jpeg
IMG_20240229_1210_Leap Day.jpg
IMG_20240307_0815_holiday.JPG
IMG_20240307_815_late.JPG
IMG_2024317_0815_short.JPG
img_20240308_1100_lower.jpg
IMG_20240309_1100_.jpg
IMG_20240310_1445_Lake_View.Jpg
IMG_20240311_0700_Bridge 2.jpg
IMG_20240312_0700_draft.jpg.bak
IMG_20240313_2130_HARBOUR.jpg
notes.txt
VID_20240307_0815_holiday.mp4
"""

folder = Path("/app/photos")
folder.mkdir(parents=True)
for number, name in enumerate(NAMES.strip().splitlines(), 1):
    (folder / name).write_text(f"picture {number:02}\n" * number)

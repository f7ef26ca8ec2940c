#!/bin/bash
# All measurements of docs/kernels.md on one H200 in one call (about 6 minutes); results in $OUT/kernels.tgz.
# Every phase has its own process and time limit, the warp-specialised kernel first: a fault there can hang.
W=${1:-/tmp/h200-kernels}
mkdir -p "$W" && export PYTHONUNBUFFERED=1
pack() { tar czf "$OUT/kernels.tgz" -C "$W" .; }

began=$SECONDS
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,clocks_event_reasons.active --format=csv -lms 100 > "$W/smi.csv" &
smi=$!
timeout -k 5 110 python3 benchmarks/h200_moe.py --out "$W" --phases sanitize > "$W/compiled.txt" 2>&1 &  # fills the cache
compiling=$!
timeout -k 5 90 python3 benchmarks/h200_moe.py --out "$W" --phases special 2>&1 | tee "$W/special.txt" | cut -c1-400
echo "special $((SECONDS - began)) s"; pack
timeout -k 5 215 python3 benchmarks/h200_moe.py --out "$W" --phases limits,tune,time,others,peers --special "$W/special.json" \
  --tokens 1,2,4,8,16,32,64,128,256,512,1024,2048,4096,16384,32768 --tune-formats fp8 --budget 190 --rounds 200 \
  --tune-shapes glm-4.5-air:1024+2048+4096+16384+32768,glm-4.7-flash:1+8+32+128+1024+4096,glm-4.7:1+8+32+128+1024+4096,glm-5:1+8+32+128+1024+4096 \
  2>&1 | tee "$W/time.txt" | cut -c1-220
echo "time $((SECONDS - began)) s"; kill $smi; wait $compiling; pack
timeout -k 5 150 compute-sanitizer --tool memcheck python3 benchmarks/h200_moe.py --out "$W" --phases sanitize \
  > "$W/sanitizer.txt" 2>&1 &
sanitizing=$!
timeout -k 5 160 python3 benchmarks/h200_moe.py --out "$W" --phases check --configs "$W" --seeds 20 --budget 125 \
  --check-tokens 1,2,3,5,7,8,16,31,32,64,128,1024,4096 \
  --plan fp8:glm-5,fp8:glm-4.7,nvfp4:mini,nvfp4:glm-4.7-flash,nvfp4:glm-4.5-air,nvfp4:glm-4.7,nvfp4:glm-5,fp8:glm-4.5-air,fp8:mini,fp8:glm-4.7-flash \
  2>&1 | tee "$W/check.txt" | cut -c1-420
echo "check $((SECONDS - began)) s"; pack
wait $sanitizing; grep -v "^fp8\|^nvfp4" "$W/sanitizer.txt" | tail -4; pack
timeout -k 5 70 ncu --clock-control none -k regex:grouped_kernel --launch-skip 2 --launch-count 2 --section SpeedOfLight \
  --section MemoryWorkloadAnalysis --section ComputeWorkloadAnalysis --section WarpStateStats --section SchedulerStats \
  --metrics l1tex__m_xbar2l1tex_read_bytes.sum,gpu__time_duration.sum python3 benchmarks/h200_moe.py --out "$W" \
  --phases profile --tokens 4096 --configs "$W" > "$W/ncu.txt" 2>&1
grep -i "duration\|xbar2l1tex\|L2 Cache Throughput\|Compute (SM) Thr" "$W/ncu.txt"
echo "all $((SECONDS - began)) s"; pack

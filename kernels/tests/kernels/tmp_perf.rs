use crate::common::*;
use float8_kernels::*;
#[test]
fn tmp_perf() {
    let Some(client) = client() else { return };
    for (m, n, k) in [(512usize, 512usize, 512usize), (1024, 1024, 1024), (256, 1024, 256)] {
        let mut r = Random::new(1);
        let x = r.values(m * k);
        let w = r.values(n * k);
        let vx = upload(&client, &x, [m, k], Layout::RowMajor, F32);
        let vw = upload(&client, &w, [n, k], Layout::RowMajor, F32);
        let cast = tensorwise(Format::E4m3, ScaleMode::F32);
        let mut best = [f64::MAX; 3];
        for _ in 0..4 {
            sync(&client);
            let t = std::time::Instant::now();
            let qx = quantize(&client, &vx, cast, Orientation::Both).unwrap();
            sync(&client);
            best[0] = best[0].min(t.elapsed().as_secs_f64());
            let qw = quantize(&client, &vw, cast, Orientation::Rows).unwrap();
            sync(&client);
            let t = std::time::Instant::now();
            let _ = scaled_gemm(&client, &qx.rows.unwrap(), &qw.rows.unwrap(), None, F32).unwrap();
            sync(&client);
            best[1] = best[1].min(t.elapsed().as_secs_f64());
            let t = std::time::Instant::now();
            let mut out = vec![0u8; x.len()];
            let a = reference::amax(&x);
            reference::cast(&x, reference::amax_to_scale(a, Format::E4m3, ScaleMode::F32), Format::E4m3, &mut out);
            std::hint::black_box(&out);
            best[2] = best[2].min(t.elapsed().as_secs_f64());
        }
        let sample = scaled_time(&x);
        println!(
            "{m}x{n}x{k}: quantize both {:.2} ms, gemm {:.2} ms = {:.2} GFLOP/s, host cast {:.3} ms = {:.0} Melem/s, host amax {sample:.3} ms",
            best[0] * 1e3,
            best[1] * 1e3,
            2e-9 * (m * n * k) as f64 / best[1],
            best[2] * 1e3,
            (m * k) as f64 / best[2] / 1e6
        );
    }
}
fn scaled_time(x: &[f32]) -> f64 {
    let t = std::time::Instant::now();
    std::hint::black_box(reference::amax(x));
    t.elapsed().as_secs_f64() * 1e3
}

//! E8M0 bytes and their tiles.

use float8_kernels::InvScale;
use float8_kernels::mx::{from_blocked, to_blocked};

#[test]
fn bytes_are_powers_of_two() {
    for byte in 0..=255 {
        let value = InvScale::from_e8m0(byte);
        assert_eq!(value.to_e8m0(), Some(byte));
        assert!(byte == 255 || f64::from(value.get()) == 2f64.powi(i32::from(byte) - 127));
    }
    assert_eq!([0.0, 3.0, -1.0, f32::INFINITY].map(|x| InvScale::new(x).to_e8m0()), [None; 4]);
}

#[test]
fn tiles_hold_every_scale_once() {
    for (rows, blocks) in [(1, 1), (128, 4), (129, 5), (40, 8), (300, 3)] {
        let scales: Vec<u8> = (0..rows * blocks).map(|i| (i % 251) as u8 + 1).collect();
        let tiles = to_blocked(&scales, rows, blocks);
        assert_eq!(from_blocked(&tiles, rows, blocks), scales);
        assert_eq!(tiles.iter().filter(|&&byte| byte != 0).count(), scales.len());
    }
    // cuBLASLt's tile: rows 0, 32, 64 and 96 are the first 16 bytes.
    let tiles = to_blocked(&(0..512).map(|i| (i / 4) as u8).collect::<Vec<_>>(), 128, 4);
    assert_eq!(tiles[..16], [0, 0, 0, 0, 32, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 96]);
    assert_eq!(tiles[16..20], [1; 4]);
}

//! Decoding of the matrix products of warps and warpgroups.

use super::instr::{Mma, Wgmma, Wmma};
use super::operand::ElementType;
use super::reader::{A, Ds, G, Lit, Reader, S, Ss, element_types, known};
use super::text::Operand;

/// Shapes of `wmma`: M, N and K.
const WMMA: [(&str, [usize; 3]); 4] =
    [("m16n16k8", [16, 16, 8]), ("m16n16k16", [16, 16, 16]), ("m32n8k16", [32, 8, 16]), ("m8n32k16", [8, 32, 16])];

pub(super) fn wgmma(o: &mut Reader, shape: &str) -> Result<Wgmma, String> {
    let [ElementType::F32, a_type, b_type] = element_types(o.parts)[..] else { return known(None) };
    let n = shape.strip_prefix("m64n").and_then(|rest| rest.split('k').next());
    let n: usize = n.and_then(|n| n.parse().ok()).ok_or("no shape")?;
    let k = 32 / a_type.bytes();
    if a_type.bytes() != b_type.bytes() || a_type.bytes() > 2 || !shape.ends_with(&format!("k{k}")) {
        return known(None);
    }
    let (d, a, b) = (o.read::<Ds>()?, o.read::<Ss<64>>()?, o.read::<S<64>>()?);
    if d.len() != n / 2 || !n.is_multiple_of(8) || n > 256 || ![1, 4].contains(&a.len()) {
        return Err(format!("{} accumulators and {} registers of A for N = {n}", d.len(), a.len()));
    }
    let scale_d = o.read_if::<G>(o.more())?;
    let mut flags = [0; 4];
    for flag in &mut flags {
        *flag = o.read_if::<Lit>(o.more())?.unwrap_or(0) as i32;
    }
    let negate = [flags[0] == -1, flags[1] == -1];
    // With A in registers only B has a flag.
    let transposed = if a.len() == 4 { [false, flags[2] == 1] } else { [flags[2] == 1, flags[3] == 1] };
    Ok(Wgmma { n, types: [a_type, b_type], d: d.into(), a, b, scale_d, negate, transposed })
}

pub(super) fn mma(o: &mut Reader, shape: &str) -> Result<Mma, String> {
    let [d_type, a_type, b_type, c_type] = element_types(o.parts)[..] else { return known(None) };
    let half = [d_type, c_type] == [ElementType::F16; 2];
    let shapes = [("m16n8k8", 8), ("m16n8k16", 16), ("m16n8k32", 32)];
    let k = known(shapes.into_iter().find(|(name, _)| *name == shape))?.1;
    let bytes = a_type.bytes();
    if bytes != b_type.bytes() || bytes > 2 || (half && bytes != 2) || o.has("scale_vec::2X") || o.has("scale_vec::4X")
    {
        return known(None);
    }
    let (d, a, b, c) = (o.read::<Ds>()?, o.read::<Ss<32>>()?, o.read::<Ss<32>>()?, o.read::<Ss<32>>()?);
    let sums = if half { 2 } else { 4 };
    if a.len() * 4 != k * bytes / 2 || b.len() * 2 != a.len() || d.len() != sums || c.len() != sums {
        return Err("the registers do not fit the shape".into());
    }
    let scale = |o: &mut Reader| {
        let register = o.read::<S<32>>()?;
        match o.next()? {
            Operand::Vector(ids) => match ids[..] {
                [Operand::Imm(byte), Operand::Imm(thread)] => Ok((register, byte as u32, thread as u32)),
                _ => Err("selectors are no literals".to_string()),
            },
            _ => Err("no selectors".into()),
        }
    };
    let scales = if o.has("block_scale") { Some([scale(o)?, scale(o)?]) } else { None };
    Ok(Mma { k, types: [a_type, b_type], d, a, b, c, scales, half })
}

pub(super) fn wmma(o: &mut Reader, kind: &str, matrix: &str) -> Result<Wmma, String> {
    let shape @ [m, n, k] = known(WMMA.into_iter().find(|(name, _)| o.has(name)))?.1;
    let (types, column) = (element_types(o.parts), o.has("col"));
    Ok(match (kind, &types[..]) {
        ("load" | "store", [ty]) => {
            let size = match matrix {
                "a" => [m, k],
                "b" => [k, n],
                _ => [m, n],
            };
            let store = kind == "store";
            let (before, address) = (o.read_if::<Ds>(!store)?, o.read::<A>()?);
            let registers = before.map_or_else(|| o.read::<Ss<32>>(), Ok)?;
            Wmma::Move { registers, address, stride: o.read::<S<32>>()?, size, column, ty: *ty, store }
        }
        ("mma", types) => {
            // f16 operands are implicit: `.f32.f32` are D and C.
            let ty = match types {
                [ElementType::F32, ElementType::F32] => ElementType::F16,
                [ElementType::F32, a, b, ElementType::F32] if a == b => *a,
                _ => return known(None),
            };
            let (d, a) = (o.read::<Ds>()?, o.read::<Ss<32>>()?);
            Wmma::Mma { d, a, b: o.read::<Ss<32>>()?, c: o.read::<Ss<32>>()?, ty, shape }
        }
        _ => return known(None),
    })
}

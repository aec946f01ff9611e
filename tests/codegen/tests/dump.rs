use codegen::variants::generate;
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
#[test]
fn dump() {
    float8_kernels::trap_stuck_barriers(false);
    let root = std::path::PathBuf::from(std::env::var_os("DUMP").unwrap());
    for sm in [80u16, 89, 90, 100, 120] {
        let dir = root.join(sm.to_string());
        std::fs::create_dir_all(&dir).unwrap();
        let mut all = BTreeSet::new();
        for k in generate(sm).into_iter().filter(|k| k.name.contains("gemm")) {
            let mut lines: Vec<_> = k.source.lines().collect();
            lines.sort_unstable();
            let mut h = DefaultHasher::new();
            lines.hash(&mut h);
            let id = format!("{}-{:016x}", k.name, h.finish());
            std::fs::write(dir.join(format!("{id}.cu")), &k.source).unwrap();
            all.insert(id);
        }
        std::fs::write(dir.join("index"), all.into_iter().collect::<Vec<_>>().join("\n")).unwrap();
    }
}
